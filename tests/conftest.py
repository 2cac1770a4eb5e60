"""Makes `tests.support` importable however pytest is started, and its fixtures known to every test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.kafka import kafka, kafka_folder, make_kafka, own_kafka, prefix, prepare_for

__all__ = ["kafka", "kafka_folder", "make_kafka", "own_kafka", "prefix"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: files that need the same costly server go to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.parallel import OneServer

    return OneServer(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs that learn come last: they take most minutes, and CI may have no time for every slow test."""
    runs = Path(__file__).parent / "end_to_end"
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None and runs in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        prepare_for(session.items)
