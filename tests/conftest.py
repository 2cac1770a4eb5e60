"""Makes `tests.support` importable however pytest is started, and its fixtures known to every test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.kafka import kafka, kafka_folder, make_kafka, own_kafka, prefix, prepare_for

__all__ = ["kafka", "kafka_folder", "make_kafka", "own_kafka", "prefix"]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        prepare_for(session.items)
