"""How far generation may run ahead: the short formulas against the rule that they stand for, spelled out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from consumers.admission import batches_allowed, least_version, next_step
from consumers.ledger import Ledger
from streams.events import BatchCut, CutGroup, EpochStarted, LimitChanged, WeightsPublished
from tests.support.events import put, run_log


def ledger_after(steps: int, unpublished: int, limit: int, change: LimitChanged | None) -> Ledger:
    """A run of one group a step, the newest of whose steps have not published their versions yet."""
    log, topics = run_log()
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=0))
    if change is not None:
        put(log, topics, "ledger", change)
    for step in range(1, steps + 1):
        cut = BatchCut(
            epoch=0, version=step - 1, step=step, groups=[CutGroup(f"0-{step}", step, 0, step, [])],
            positions=[0], frontier=step, limit=limit, on_stale="drop", seed=0, ledger_read_to=0, cut_ms=0,
        )  # fmt: skip
        put(log, topics, "ledger", cut)
    for version in range(steps - unpublished + 1):
        put(
            log,
            topics,
            "ledger",
            WeightsPublished(epoch=0, version=version, step=version, digest=f"d{version}", uris={}),
        )
    ledger = Ledger(log, topics, limit=limit)
    ledger.catch_up()
    return ledger


CHANGES = st.none() | st.builds(LimitChanged, limit=st.integers(0, 6), from_step=st.integers(0, 20))


@given(steps=st.integers(0, 8), unpublished=st.integers(0, 2), limit=st.integers(0, 6), change=CHANGES)
def test_a_batch_is_admitted_exactly_while_it_would_be_fresh_at_its_cut(steps, unpublished, limit, change):
    ledger = ledger_after(steps, min(steps, unpublished), limit, change)
    published, first = steps - min(steps, unpublished), next_step(ledger)
    assert first == published + 1
    allowed = 0
    while allowed <= ledger.limit_at(first + allowed):  # generated now, it is `allowed` versions old then
        allowed += 1
    assert batches_allowed(ledger) == allowed >= 1
    for batch in range(allowed):
        least = least_version(ledger, batch)
        assert least <= published, "an engine may begin at once"
        for earlier in range(batch + 1):  # should groups before it be dropped
            if first + earlier > ledger.step:  # that step is not cut yet
                assert published + earlier - least <= ledger.limit_at(first + earlier)


def test_without_a_change_the_gate_is_the_limit_and_one():
    ledger = ledger_after(5, 1, 2, None)
    assert batches_allowed(ledger) == 3
    assert [least_version(ledger, batch) for batch in range(3)] == [2, 3, 4]
