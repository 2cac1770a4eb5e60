"""What every stage shares: its place in the input, rebuilt from its own output."""

from __future__ import annotations

from consumers.runner import Inputs, recover, stamp
from streams import codec
from streams.events import ScoringFailed
from tests.support.events import failed, run_log


class Stage:
    """A stage that copies trajectories to rewards one by one; what it does is told by the test."""

    def __init__(self, log, topics) -> None:
        self.log, self.topics = log, topics
        place = recover(log, topics, "rewards", 0, ["trajectories"])
        self.position = place.positions["trajectories"]
        self.inputs = Inputs(self.position, place.reached["trajectories"])
        self.done = {event.seq for event in place.done if isinstance(event, ScoringFailed)}
        self.done |= place.finished["trajectories"]

    def read(self, count: int) -> None:
        for offset in range(self.position, self.position + count):
            self.inputs.started(offset)
            if offset in self.done:
                self.inputs.finished(offset)
        self.position += count

    def write(self, *offsets: int) -> None:
        outputs = [failed(offset, 0, 0, "no matter") for offset in offsets]
        stamped = stamp(outputs, {"trajectories": self.inputs.progress()})
        self.log.append(
            self.topics.name("rewards"), 0, [codec.encode(each, producer="t") for each in stamped]
        )
        for offset in offsets:
            self.inputs.finished(offset)


def test_what_was_done_is_known_after_two_crashes_in_a_row():
    """The second incarnation is far behind the first when it dies, so its own outputs say little of what is done."""
    log, topics = run_log()
    first = Stage(log, topics)
    first.read(100)
    first.write(*range(10, 50))
    first.write(*range(51, 100))  # 0 to 9 and 50 hang
    second = Stage(log, topics)
    assert second.position == 0
    second.read(5)
    second.write(0, 1, 2, 3, 4)
    second.read(5)
    second.write(5, 6, 7, 8)
    second.write(9)
    third = Stage(log, topics)
    assert third.position == 9
    assert {offset for offset in range(10, 100) if offset not in third.done} == {50}


def test_progress_never_says_less_than_the_incarnation_before():
    log, topics = run_log()
    first = Stage(log, topics)
    first.read(20)
    first.write(*range(1, 20))
    second = Stage(log, topics)
    second.read(2)
    said = second.inputs.progress()
    assert (said.read_to, said.low_water) == (20, 0)
    second.read(30)
    assert second.inputs.progress().read_to == 32
