"""The ledger as people and audits see it: what counts, what is void, what cannot be read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from consumers.ledger import Ledger
from replay.ledger import LedgerReader, RunView, read_ledger, read_run
from streams import codec
from streams.events import EpochStarted, Event, LimitChanged, Paused, Resumed, WeightsPublished
from streams.log import NewRecord
from streams.memory import MemoryLog
from streams.topics import Topics
from tests.support import recorded as run
from tests.support.recorded import recorded


def append(log, topics, *events: Event) -> None:
    for event in events:
        log.append(topics.name("ledger"), 0, [codec.encode(event, producer="test")])


def empty() -> tuple[MemoryLog, Topics]:
    log, topics = MemoryLog(), Topics("run", 1)
    topics.create(log)
    return log, topics


def test_a_finished_run_adds_up():
    view = read_run(*recorded())
    assert view.run is not None and view.run.partitions == 2
    assert [number for number, _ in view.epochs] == [1]
    assert [(cut.offset, cut.event.step) for cut in view.cuts] == [(3, 1), (5, 2), (8, 3)]
    assert [(each.offset, each.drop.group_id, each.drop.reason) for each in view.drops] == [
        (5, "0-4", "zero_variance")
    ]
    assert [event.version for event in view.versions] == [0, 1, 2, 3]
    assert (view.step, view.version) == (3, 3)
    assert view.data_ended is not None and view.data_ended.count == 6
    assert view.finished is not None and view.finished.reason == "data_ended"


def test_an_empty_ledger_and_a_missing_topic_are_a_run_that_has_not_begun():
    assert read_run(*empty()).epoch == -1
    view = read_run(MemoryLog(), Topics("run", 1))
    assert (view.run, view.step, view.version) == (None, 0, -1)


def test_after_a_takeover_records_of_the_older_epoch_are_void_and_kept_apart():
    log, topics = empty()
    append(log, topics, EpochStarted(producer="a", started_ms=1))  # epoch 0
    append(log, topics, WeightsPublished(epoch=0, version=0, step=0, digest="a0", uris={}))
    append(log, topics, EpochStarted(producer="b", started_ms=2))  # epoch 2
    append(log, topics, WeightsPublished(epoch=0, version=1, step=1, digest="a1", uris={}))  # from the zombie
    append(log, topics, WeightsPublished(epoch=2, version=1, step=1, digest="b1", uris={}))
    entries, view = read_ledger(log, topics)
    assert [event.digest for event in view.versions] == ["a0", "b1"]
    assert [entry.offset for entry in view.void] == [3]
    assert [entry.void for entry in entries] == [False, False, False, True, False]


def test_a_record_of_an_epoch_that_never_began_is_void():
    log, topics = empty()
    append(log, topics, EpochStarted(producer="a", started_ms=1))
    append(log, topics, WeightsPublished(epoch=9, version=0, step=0, digest="x", uris={}))
    view = read_run(log, topics)
    assert view.versions == []
    assert len(view.void) == 1


def test_records_of_the_command_line_are_never_void():
    log, topics = empty()
    append(log, topics, EpochStarted(producer="a", started_ms=1))
    append(
        log, topics, LimitChanged(limit=4), Paused(reason="lunch"), EpochStarted(producer="b", started_ms=2)
    )
    view = read_run(log, topics)
    assert [(offset, event.limit) for offset, event in view.limits] == [(1, 4)]
    assert view.paused
    append(log, topics, Resumed())
    assert not read_run(log, topics).paused


def test_a_change_of_the_limit_binds_only_a_reader_that_was_past_it():
    log, topics = empty()
    append(
        log, topics, EpochStarted(producer="a", started_ms=1), LimitChanged(limit=4), LimitChanged(limit=7)
    )
    view = read_run(log, topics)
    assert view.limit_changed_before(1, step=1) is None
    assert view.limit_changed_before(2, step=1) == LimitChanged(limit=4)
    assert view.limit_changed_before(3, step=1) == LimitChanged(limit=7)


def ledger_of(*events: Event | int) -> RunView:
    """The view of a ledger; a number stands for the cut of that step, which had read all before it."""
    log, topics = empty()
    for offset, event in enumerate(events):
        if isinstance(event, int):
            event = run.cut(event, [0], [0, 0], epoch=0, ledger_read_to=offset)
        append(log, topics, event)
    return read_run(log, topics)


def test_a_change_from_a_step_on_waits_for_it():
    change = LimitChanged(limit=4, from_step=3)
    view = ledger_of(EpochStarted(producer="a", started_ms=1), 1, change, 2)
    assert [view.limit_changed_before(4, step) for step in (3, 2)] == [change, None]
    assert view.limit_changed_before(2, step=3) is None, "that reader had not come to it"


def test_a_newer_change_replaces_one_that_waits_and_not_one_that_has_begun():
    begun, waits = LimitChanged(limit=4, from_step=2), LimitChanged(limit=9, from_step=5)
    view = ledger_of(EpochStarted(producer="a", started_ms=1), begun, 1, waits, 2, 3)
    assert [view.limit_changed_before(6, step) for step in (4, 5)] == [begun, waits]
    newest = LimitChanged(limit=0, from_step=7)
    view = ledger_of(EpochStarted(producer="a", started_ms=1), begun, 1, waits, 2, 3, newest, 4)
    assert [view.limit_changed_before(8, step) for step in (5, 6, 7)] == [begun, begun, newest]
    at_once = LimitChanged(limit=1)
    view = ledger_of(EpochStarted(producer="a", started_ms=1), waits, at_once, 1)
    assert [view.limit_changed_before(4, step) for step in (2, 5)] == [at_once, at_once]


LIMITS = st.builds(LimitChanged, limit=st.integers(0, 5), from_step=st.integers(0, 12))


@given(st.lists(st.one_of(LIMITS, st.integers(0, 3)), max_size=30))
def test_the_stages_and_the_audit_agree_on_the_limit_of_every_cut(moves: list[LimitChanged | int]):
    """A number is a cut whose trainer had not seen that many of the newest records."""
    log, topics = empty()
    append(log, topics, EpochStarted(producer="a", started_ms=1))
    step, read_to, expected = 0, 1, []
    for move in moves:
        if isinstance(move, LimitChanged):
            append(log, topics, move)
            continue
        read_to = max(read_to, log.end(topics.name("ledger"), 0) - move)  # never behind its own last cut
        stage = Ledger(log, topics, limit=99)
        stage.catch_up(read_to)
        step += 1
        expected.append(stage.limit)
        append(log, topics, run.cut(step, [0], [0, 0], epoch=0, limit=stage.limit, ledger_read_to=read_to))
        read_to = log.end(topics.name("ledger"), 0)
    view = read_run(log, topics)
    found = [view.limit_changed_before(cut.event.ledger_read_to, cut.event.step) for cut in view.cuts]
    assert [99 if change is None else change.limit for change in found] == expected


def test_what_cannot_be_read_is_an_entry_with_its_problem():
    log, topics = recorded()
    log.append(topics.name("ledger"), 0, [NewRecord(b"\xc1ga")])
    append(log, topics, run.published(4))
    view = read_run(log, topics)
    assert [entry.offset for entry in view.problems] == [11]
    assert view.problems[0].problem.startswith("CodecError:")
    assert view.version == 4, "reading went on"


def test_following_gives_each_entry_once():
    log, topics = empty()
    reader = LedgerReader(log, topics)
    assert reader.catch_up() == []
    append(log, topics, EpochStarted(producer="a", started_ms=1))
    assert [entry.offset for entry in reader.catch_up()] == [0]
    assert reader.catch_up() == []
    append(log, topics, LimitChanged(limit=1))
    assert [entry.offset for entry in reader.catch_up()] == [1]
    assert reader.view.epoch == 0
