"""Appends that the log refuses for a while: kept, sent again, in order, and never in the way of a stop."""

from __future__ import annotations

import time
from concurrent.futures import Future
from datetime import timedelta

import pytest

from consumers.outbox import Outbox, append_patiently, flush_all, settled
from streams.errors import LogFull, LogUnavailable
from streams.log import NewRecord
from streams.memory import MemoryLog


class FullLog(MemoryLog):
    """Refuses every append while `full`."""

    full = False

    def submit(self, topic, partition, records):
        if not self.full:
            return super().submit(topic, partition, records)
        future: Future[int] = Future()
        future.set_exception(LogFull("no room"))
        return future


@pytest.fixture
def log():
    made = FullLog()
    made.create_topic("t", 8)
    return made


def values(log, partition: int = 0) -> list[bytes]:
    return [record.value for record in log.read("t", partition, 0).records]


def test_a_backlog_goes_out_at_once_when_there_is_room_again_and_in_order(log, caplog):
    outbox, acked = Outbox(log, "t", 0, retry_s=0.1), []
    log.full = True
    for number in range(50):
        outbox.send([NewRecord(b"%d" % number)], acked.append)
    outbox.poll()
    assert outbox.stuck and not acked
    log.full = False
    began = time.monotonic()
    outbox.flush(timedelta(seconds=10))
    assert time.monotonic() - began < 1  # not a pause for each of them
    assert values(log) == [b"%d" % number for number in range(50)]
    assert acked == list(range(50)) and not outbox.stuck
    assert len([each for each in caplog.records if "cannot append" in each.message]) == 1


def test_a_stage_with_many_partitions_ends_in_time_although_nothing_is_taken(log, caplog):
    outboxes = [Outbox(log, "t", partition) for partition in range(8)]
    log.full = True
    for outbox in outboxes:
        outbox.send([NewRecord(b"x")])
    began = time.monotonic()
    for outbox in outboxes:  # one round of the stage
        outbox.poll()
    assert flush_all(outboxes, timedelta(seconds=0.3)) == 8, "so many records are not delivered"
    assert time.monotonic() - began < 1.5
    assert len([each for each in caplog.records if "not acknowledged" in each.message]) == 8


def test_only_what_is_not_acknowledged_counts_as_undelivered(log):
    outbox = Outbox(log, "t", 0)
    outbox.send([NewRecord(b"a"), NewRecord(b"b")])
    log.full = True
    outbox.send([NewRecord(b"c"), NewRecord(b"d"), NewRecord(b"e")])
    assert outbox.unacknowledged == 3
    log.full = False
    assert flush_all([outbox], timedelta(seconds=5)) == 0
    assert values(log) == [b"a", b"b", b"c", b"d", b"e"]


def test_waiting_for_an_append_ends_with_a_stop_or_its_deadline():
    future: Future[int] = Future()
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="an append to t/0 is not acknowledged after 0 s"):
        settled(future, "an append to t/0", stop=lambda: True, timeout=timedelta(seconds=60))
    with pytest.raises(LogUnavailable):
        settled(future, "an append to t/0", stop=lambda: False, timeout=timedelta(seconds=0.2))
    assert time.monotonic() - began < 1
    future.set_exception(LogFull("no room"))
    with pytest.raises(LogFull):
        settled(future, "an append", stop=lambda: False, timeout=timedelta(seconds=1))
    done: Future[int] = Future()
    done.set_result(7)
    assert settled(done, "an append", stop=lambda: True, timeout=timedelta(0)) == 7


def test_a_patient_append_waits_for_room_and_gives_way_to_a_stop(log):
    log.full = True
    with pytest.raises(LogFull):
        append_patiently(log, "t", 0, [NewRecord(b"x")], who="test", stop=lambda: True)
    answers = iter([False])

    def stop() -> bool:
        log.full = False  # room by the time of the next attempt
        return next(answers)

    assert append_patiently(log, "t", 0, [NewRecord(b"x")], who="test", stop=stop) == 0
    assert values(log) == [b"x"]
