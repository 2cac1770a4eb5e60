"""Outages by script: what a daemon's log waits for, how often it tries, what it says, and what it never does twice."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import pytest

from streams import patient
from streams.errors import LogFull, LogUnavailable, OffsetOutOfRange
from streams.log import EventLog, NewRecord, TopicPartition
from streams.memory import MemoryLog
from streams.patient import PatientLog

T = TopicPartition("t", 0)


class Clock:
    """Stands in for the module `time`: sleeping takes no time, and says how long it was."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time_ns(self) -> int:
        return time.time_ns()


class Failing(MemoryLog):
    """Does not answer until `back_at` on the clock, or while `down`; notes when it was asked."""

    def __init__(self, clock: Clock | None = None, back_at: float = 0.0, takes_s: float = 0.0) -> None:
        super().__init__()
        self.clock, self.back_at, self.takes_s = clock, back_at, takes_s
        self.down = False
        self.asked: list[float] = []
        super().create_topic("t", 1)

    def check(self) -> None:
        if self.clock is not None:
            self.clock.now += self.takes_s
            self.asked.append(self.clock.now)
        if self.down or (self.clock is not None and self.clock.now < self.back_at):
            raise LogUnavailable("no broker answers")

    def read(self, *args, **kw):
        self.check()
        return super().read(*args, **kw)

    def start(self, *args):
        self.check()
        return super().start(*args)

    def end(self, *args):
        self.check()
        return super().end(*args)

    def recent_end(self, *args):
        self.check()
        return MemoryLog.end(self, *args)

    def wait(self, *args):
        self.check()
        return super().wait(*args)

    def topics(self):
        self.check()
        return super().topics()

    def partitions(self, *args):
        self.check()
        return super().partitions(*args)

    def offset_at(self, *args):
        self.check()
        return super().offset_at(*args)

    def join(self, *args, **kw):
        self.check()
        return super().join(*args, **kw)

    def hints(self, *args):
        self.check()
        return super().hints(*args)

    def groups(self, *args):
        self.check()
        return super().groups(*args)

    def commit_hint(self, *args):
        self.check()
        return super().commit_hint(*args)

    def create_topic(self, *args, **kw):
        self.check()
        return super().create_topic(*args, **kw)

    def check_topic(self, *args, **kw):
        self.check()
        return super().check_topic(*args, **kw)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patient, "time", made)
    return made


CALLS = {
    "read": lambda log: log.read(*T, 0),
    "start": lambda log: log.start(*T),
    "end": lambda log: log.end(*T),
    "recent_end": lambda log: log.recent_end(*T),
    "wait": lambda log: log.wait({T: 0}, timedelta(0)),
    "topics": lambda log: log.topics(),
    "partitions": lambda log: log.partitions("t"),
    "offset_at": lambda log: log.offset_at(*T, 0),
    "join": lambda log: log.join("g", "t", replica=0, replicas=1),
    "hints": lambda log: log.hints("g"),
    "groups": lambda log: log.groups(),
    "create_topic": lambda log: log.create_topic("t", 1),
    "check_topic": lambda log: log.check_topic("t", 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_outage_is_waited_for_with_at_most_twenty_attempts_in_ten_seconds(name: str, clock: Clock):
    log = Failing(clock, back_at=clock.now + 9.9)
    began = clock.now
    CALLS[name](PatientLog(log, stop=lambda: False))
    attempts = [at - began for at in log.asked]
    assert 5 < len([at for at in attempts if at <= 10]) <= 20
    assert attempts[-1] <= 9.9 + 1.1, "it sees within about a second that the log is back"


def test_a_wait_is_announced_at_once_and_again_at_growing_intervals(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    began, said = clock.now, []
    log = Failing(clock, back_at=clock.now + 200)

    class At(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((round(clock.now - began), record.getMessage()))

    handler = At()
    logging.getLogger("streams.patient").addHandler(handler)
    try:
        PatientLog(log, stop=lambda: False, who="reward-0").read(*T, 0)
    finally:
        logging.getLogger("streams.patient").removeHandler(handler)
    assert said[0] == (0, "reward-0: waits for t/0 to be read from 0 on: no broker answers")
    assert re.match(
        r"reward-0: has waited 1[01] s for t/0 to be read from 0 on: no broker answers", said[1][1]
    )
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(said[:-1])]
    assert gaps == pytest.approx([10, 20, 40, 60, 60], abs=1.5)
    assert said[-1][1].startswith("reward-0: the log answers again after 200")


def test_a_call_that_itself_takes_ten_seconds_is_not_repeated_without_a_pause(clock: Clock):
    log = Failing(clock, back_at=clock.now + 35, takes_s=10)
    PatientLog(log, stop=lambda: False).end(*T)
    assert len(log.asked) == 4


def test_other_errors_are_for_the_stage_at_once(clock: Clock):
    log = Failing(clock)
    with pytest.raises(OffsetOutOfRange):
        PatientLog(log, stop=lambda: False).read(*T, 7)
    assert len(log.asked) == 1


def test_a_stop_ends_the_wait_within_a_moment():
    log, stop = Failing(), threading.Event()
    log.down = True
    waiting = PatientLog(log, stop.is_set)
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="no broker answers"):
        waiting.read(*T, 0)
    assert 0.2 <= time.monotonic() - began < 1.0
    timer.join()
    waiting.close()  # nothing was given up: no error


def test_a_hint_that_an_outage_swallows_harms_nobody(clock: Clock):
    log = Failing(clock)
    log.down = True
    PatientLog(log, stop=lambda: False).commit_hint("g", {T: 1})


class Losing(Failing):
    """Appends whose acknowledgement is lost: `lands` says whether the records are in the log all the same."""

    def __init__(self, lands: list[bool], **kw) -> None:
        super().__init__(**kw)
        self.lands, self.submitted = lands, 0

    def submit(self, topic, partition, records):
        self.submitted += 1
        if not self.lands:
            return super().submit(topic, partition, records)
        if self.lands.pop(0):
            super().submit(topic, partition, records)
        future: Future[int] = Future()
        future.set_exception(LogUnavailable("not acknowledged in time"))
        return future


def values(log: EventLog) -> list[bytes]:
    return [record.value for record in MemoryLog.read(log, *T, 0).records]  # type: ignore[arg-type]


def test_an_append_that_landed_without_its_acknowledgement_is_found_and_not_written_again(clock: Clock):
    log = Losing([True], clock=clock)
    waiting = PatientLog(log, stop=lambda: False)
    assert waiting.append(*T, [NewRecord(b"before")]) == 0
    log.lands = [True]
    assert waiting.append(*T, [NewRecord(b"a", (("h", b"1"),)), NewRecord(b"b")]) == 1
    assert waiting.append(*T, [NewRecord(b"after")]) == 3
    assert values(log) == [b"before", b"a", b"b", b"after"]
    waiting.close()


def test_an_append_that_did_not_land_is_written_once(clock: Clock):
    log = Losing([False, False, False], clock=clock)
    waiting = PatientLog(log, stop=lambda: False)
    assert waiting.append(*T, [NewRecord(b"a")]) == 0
    assert log.submitted == 4
    assert values(log) == [b"a"]


def test_what_its_client_still_tries_to_append_is_waited_for_before_it_is_looked_for(clock: Clock):
    class Late(Losing):
        """The client has told its caller, and goes on trying."""

        def settle(self, topic: str, partition: int) -> None:
            MemoryLog.submit(self, topic, partition, [NewRecord(b"a")])

    log = Late([False], clock=clock)
    assert PatientLog(log, stop=lambda: False).append(*T, [NewRecord(b"a")]) == 0
    assert values(log) == [b"a"] and log.submitted == 1


def test_half_of_an_append_is_no_append(clock: Clock):
    """The same bytes as its first record, from another call."""
    log = Losing([False], clock=clock)
    MemoryLog.submit(log, *T, [NewRecord(b"a"), NewRecord(b"c")])
    assert PatientLog(log, stop=lambda: False).append(*T, [NewRecord(b"a"), NewRecord(b"b")]) == 2
    assert values(log) == [b"a", b"c", b"a", b"b"]


def test_a_full_log_is_for_the_caller_to_wait_for(clock: Clock):
    class Full(Failing):
        def submit(self, topic, partition, records):
            future: Future[int] = Future()
            future.set_exception(LogFull("no room"))
            return future

    with pytest.raises(LogFull):
        PatientLog(Full(clock), stop=lambda: False).append(*T, [NewRecord(b"a")])


def test_what_was_given_up_at_a_stop_is_counted_when_the_log_is_closed():
    class Silent(Failing):
        def submit(self, topic, partition, records):
            return Future()  # never acknowledged

    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="trainer: stopped with 2 records undelivered"):  # noqa: SIM117
        with PatientLog(Silent(), stop.is_set, who="trainer") as log:
            try:
                log.append(*T, [NewRecord(b"a"), NewRecord(b"b")])
            except LogUnavailable as error:
                assert "2 records are not acknowledged" in str(error)
    assert time.monotonic() - began < 1.5
    timer.join()


class Slow(Failing):
    """A healthy log that acknowledges after `delay_s`, when the record is in it."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s

    def submit(self, topic, partition, records):
        future: Future[int] = Future()

        def land() -> None:
            future.set_result(MemoryLog.submit(self, topic, partition, records).result())

        threading.Timer(self.delay_s, land).start()
        return future


def test_a_healthy_log_has_time_to_acknowledge_after_a_stop():
    log = Slow(0.12)
    waiting = PatientLog(log, stop=lambda: True)
    assert [waiting.append(*T, [NewRecord(value)]) for value in (b"a", b"b")] == [0, 1]
    assert values(log) == [b"a", b"b"]
    waiting.close()


def test_all_appends_after_a_stop_have_one_grace_between_them():
    class Silent(Failing):
        def submit(self, topic, partition, records):
            return Future()

    waiting = PatientLog(Silent(), stop=lambda: True)
    began = time.monotonic()
    for _ in range(4):
        with pytest.raises(LogUnavailable, match="not acknowledged"):
            waiting.append(*T, [NewRecord(b"a")])
    assert 0.7 <= time.monotonic() - began < 1.3
    with pytest.raises(LogUnavailable, match="4 records undelivered"):
        waiting.close()


def test_what_is_acknowledged_while_the_log_is_closed_is_not_counted_as_undelivered():
    class Closing(Failing):
        """Acknowledges the first append, and no other, in close()."""

        def __init__(self) -> None:
            super().__init__()
            self.sent: list[Future[int]] = []

        def submit(self, topic, partition, records):
            self.sent.append(Future())
            return self.sent[-1]

        def close(self) -> None:
            self.sent[0].set_result(0)
            super().close()

    def stopped_with(appends: int) -> PatientLog:
        waiting = PatientLog(Closing(), stop=lambda: True, who="trainer")
        for _ in range(appends):
            with pytest.raises(LogUnavailable):
                waiting.append(*T, [NewRecord(b"a")])
        return waiting

    stopped_with(1).close()
    with pytest.raises(LogUnavailable, match="stopped with 1 records undelivered"):
        stopped_with(2).close()


def test_what_ended_a_daemon_is_not_hidden_by_what_could_not_be_delivered(
    caplog: pytest.LogCaptureFixture,
):
    class Undelivered(MemoryLog):
        def close(self) -> None:
            raise LogUnavailable("closed with 3 records undelivered")

    with pytest.raises(ValueError, match="the cause"), PatientLog(Undelivered(), stop=lambda: False):
        raise ValueError("the cause")
    assert "closed with 3 records undelivered" in caplog.text
    with (
        pytest.raises(LogUnavailable, match="3 records undelivered"),
        PatientLog(Undelivered(), stop=lambda: False),
    ):
        pass


def test_several_threads_say_one_thing_about_one_outage(caplog: pytest.LogCaptureFixture):
    log = Failing()
    log.down = True
    waiting = PatientLog(log, stop=lambda: False)
    threads = [threading.Thread(target=CALLS[name], args=(waiting,)) for name in ("read", "end", "topics")]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    log.down = False
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert len([each for each in caplog.records if each.name == "streams.patient"]) == 1


def test_every_question_of_the_interface_reaches_the_log_behind():
    asked = {name for name, value in vars(EventLog).items() if inspect.isfunction(value) and name[0] != "_"}
    assert asked <= set(vars(PatientLog)), "a default of EventLog would answer in place of the log"
    log = MemoryLog()
    log.moves_shares = True
    assert PatientLog(log, stop=lambda: False).moves_shares
