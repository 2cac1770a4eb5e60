"""docs/events.md says what streams/events.py is."""

from __future__ import annotations

from pathlib import Path

from streams.catalogue import TOPICS, render
from streams.events import EVENT_TYPES
from streams.topics import ALL_TOPICS


def test_the_event_catalogue_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "events.md"
    assert page.read_text("utf-8") == render(), "run: python -m streams.catalogue docs/events.md"


def test_every_event_type_and_topic_is_in_the_catalogue():
    page = render()
    assert all(f"`{tag}`" in page for tag in EVENT_TYPES)
    assert tuple(TOPICS) == ALL_TOPICS
