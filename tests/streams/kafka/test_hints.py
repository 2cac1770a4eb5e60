"""In which order remembered positions reach the broker. What a real broker makes of them: tests/contracts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, cast

from kafka.structs import TopicPartition as Place

from streams.kafka.hints import HintWriter

SOON_S = 20
HERE = Place("t", 0)


class SlowAdmin:
    """Its first commit takes until it is let go; `committed` in the order in which they arrived."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.committed: list[int] = []

    def commit(self, group: str, offsets: Mapping[Place, Any], timeout_s: float) -> None:
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(SOON_S)
        self.committed.append(offsets[HERE].offset)


def test_a_position_on_its_way_when_the_log_is_closed_does_not_arrive_after_a_newer_one() -> None:
    admin = SlowAdmin()
    hints = HintWriter(cast(Any, admin), lambda group: None)
    hints.remember("g", {HERE: 5})
    assert admin.began.wait(SOON_S)
    hints.remember("g", {HERE: 3})
    closing = threading.Thread(target=hints.close, args=(SOON_S,))
    closing.start()
    time.sleep(0.1)  # it must not pass the first one by now
    admin.go_on.set()
    closing.join(SOON_S)
    assert admin.committed == [5, 3] and hints.unwritten() == {}


def test_closing_waits_no_longer_than_it_may_for_a_commit_that_hangs() -> None:
    admin = SlowAdmin()
    hints = HintWriter(cast(Any, admin), lambda group: None)
    hints.remember("g", {HERE: 5})
    assert admin.began.wait(SOON_S)
    began = time.monotonic()
    hints.close(0.2)
    assert 0.2 <= time.monotonic() - began < SOON_S / 2
    admin.go_on.set()
