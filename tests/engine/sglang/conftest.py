"""The real server's fixture, and its early start."""

from __future__ import annotations

import pytest

from tests.support.sglang import prepare_for, sglang, sglang_python, sglang_server

__all__ = ["sglang", "sglang_python", "sglang_server"]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        prepare_for(session.items)
