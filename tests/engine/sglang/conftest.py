"""Fixtures of the SGLang tests: the double with its model, and the real server with its early start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sglang import (
    make_model,
    prepare_for,
    pytest_runtest_teardown,
    sglang,
    sglang_python,
    sglang_server,
)
from tests.support.sglang_double import Double
from tests.support.sglang_versions import Versions

__all__ = ["pytest_runtest_teardown", "sglang", "sglang_python", "sglang_server"]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        prepare_for(session.items)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model-0", 0)


@pytest.fixture
def double(model: Path) -> Iterator[Double]:
    with Double(model, step_s=0.002) as double:
        yield double


@pytest.fixture
def versions(model: Path, tmp_path: Path) -> Versions:
    return Versions(model, tmp_path)
