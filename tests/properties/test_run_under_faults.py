"""The promises of DESIGN §1 and §4 under random schedules, crashes of any stage, lost and doubled samples.

Every example is a whole run: the real feeder, reward, collector and trainer on the in-memory log, moved in a random
order, any of them thrown away at any move and rebuilt from the log alone. The audit below reads only the log.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.ledger import Ledger
from replay.verify import verify
from streams.events import (
    BatchCut,
    EpochStarted,
    GroupsDropped,
    LimitChanged,
    TaskDispatched,
    TaskSkipped,
    WeightsPublished,
)
from tests.support.events import events, put
from tests.support.world import World

SLOW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def valid_ledger(world: World) -> list:
    """Ledger events that are not void: after an EpochStarted, older epochs no longer count."""
    epoch, valid = -1, []
    for offset, event in enumerate(events(world.log, world.topics, "ledger")):
        if isinstance(event, EpochStarted):
            epoch = offset
        if getattr(event, "epoch", epoch) == epoch:
            valid.append(event)
    return valid


def audit(world: World) -> dict:
    """Checks every invariant and returns what happened."""
    ledger = valid_ledger(world)
    cuts = [event for event in ledger if isinstance(event, BatchCut)]
    outcomes: Counter[int] = Counter()
    for event in ledger:
        if isinstance(event, (BatchCut, GroupsDropped)):
            outcomes.update(drop.seq for drop in event.drops)
        if isinstance(event, BatchCut):
            outcomes.update(group.seq for group in event.groups)
    dispatched = {
        event.seq
        for partition in range(world.topics.partitions)
        for event in events(world.log, world.topics, "tasks", partition)
        if isinstance(event, (TaskDispatched, TaskSkipped))
    }
    assert set(outcomes) == dispatched, "every dispatched group has an outcome"
    assert set(outcomes.values()) == {1}, f"exactly one: {outcomes}"
    uids = [member.uid for cut in cuts for group in cut.groups for member in group.members]
    assert len(uids) == len(set(uids)), "no sample is trained twice"
    assert all(
        0 <= member.staleness <= cut.limit for cut in cuts for group in cut.groups for member in group.members
    )
    assert [cut.step for cut in cuts] == list(range(1, len(cuts) + 1)), "steps are dense"
    versions = [event.version for event in ledger if isinstance(event, WeightsPublished)]
    assert versions == sorted(versions), "versions never go back"
    return {"steps": len(cuts), "trained": len(uids), "outcomes": len(outcomes), "last": versions[-1]}


def final_weights(world: World) -> str:
    return [event.digest for event in valid_ledger(world) if isinstance(event, WeightsPublished)][-1]


@given(seed=st.integers(0, 2**32), crash_rate=st.sampled_from([0.0, 0.02, 0.1]), limit=st.integers(0, 3))
@SLOW
def test_every_group_ends_exactly_once_however_often_the_stages_crash(seed, crash_rate, limit):
    choose = random.Random(seed)
    with TemporaryDirectory() as folder:
        world = World(
            Path(folder),
            limit=limit,
            loses=lambda uid: random.Random(f"{seed}lose{uid}").random() < 0.05,
            doubles=lambda uid: random.Random(f"{seed}double{uid}").random() < 0.2,
        )
        try:
            world.run(choose, crash_rate=crash_rate)
            happened = audit(world)
        finally:
            world.close()
    assert happened["outcomes"] == 12


@given(seed=st.integers(0, 2**32))
@SLOW
def test_a_trainer_that_is_killed_again_and_again_ends_with_the_same_weights_as_one_that_is_not(seed):
    """Replay equals the run: with one partition and one order of groups, crashes change no bit."""

    def weights(crash_rate: float) -> tuple[str, dict]:
        with TemporaryDirectory() as folder:
            world = World(Path(folder), partitions=1, limit=0, batch=3, patience=1e9)
            try:
                world.run(random.Random(seed), crash_rate=crash_rate)
                return final_weights(world), audit(world)
            finally:
                world.close()

    calm, happened = weights(0.0)
    shaken, happened_shaken = weights(0.1)
    assert happened == happened_shaken
    assert calm == shaken


@given(seed=st.integers(0, 2**32), crash_rate=st.sampled_from([0.0, 0.05]))
@SLOW
def test_a_run_with_a_number_of_steps_closes_what_was_still_open(seed, crash_rate):
    with TemporaryDirectory() as folder:
        world = World(Path(folder), data_epochs=None, steps=5, limit=2)
        try:
            ledger = world.run(random.Random(seed), crash_rate=crash_rate)
            happened = audit(world)
        finally:
            world.close()
    assert happened["steps"] == 5 and happened["last"] == 5
    assert ledger.finished is not None and ledger.finished.reason == "steps_reached"


@given(seed=st.integers(0, 2**32), crash_rate=st.sampled_from([0.0, 0.05]), limit=st.integers(0, 3))
@SLOW
def test_the_limit_may_be_changed_at_any_time_under_crashes_and_every_cut_keeps_it(seed, crash_rate, limit):
    """Now, from a later step on, or from one that is past; also while an older change waits for its step."""
    choose = random.Random(seed)
    with TemporaryDirectory() as folder:
        world = World(
            Path(folder),
            limit=limit,
            data_epochs=4,
            doubles=lambda uid: random.Random(f"{seed}double{uid}").random() < 0.2,
        )

        def change(ledger: Ledger) -> None:
            if choose.random() < 0.02:
                from_step = choose.choice([0, max(0, ledger.step + choose.randint(-1, 6))])
                put(
                    world.log,
                    world.topics,
                    "ledger",
                    LimitChanged(limit=choose.randint(0, 3), from_step=from_step),
                )

        try:
            world.run(choose, crash_rate=crash_rate, meanwhile=change)
            happened = audit(world)
            report = verify(world.log, world.topics)
        finally:
            world.close()
    assert report.holds, report.as_table()
    assert happened["outcomes"] == 24


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("before", "after"), [(3, 0), (2, 1), (0, 3), (1, 2)])
def test_a_change_that_is_said_early_enough_makes_no_group_too_old(tmp_path, before, after, seed):
    """Groups finish in order here, so admission alone keeps all of them in the limit of their own step."""
    world = World(tmp_path, partitions=1, limit=before, data_epochs=None, steps=14)
    change, said = LimitChanged(limit=after, from_step=8), []

    def say_once(ledger: Ledger) -> None:
        if ledger.step == 3 and not said:
            said.append(put(world.log, world.topics, "ledger", change))

    try:
        world.run(random.Random(seed), meanwhile=say_once)
        ledger = valid_ledger(world)
    finally:
        world.close()
    limits = [event.limit for event in ledger if isinstance(event, BatchCut)]
    assert limits == [before] * 7 + [after] * 7
    drops = [drop for event in ledger if isinstance(event, (BatchCut, GroupsDropped)) for drop in event.drops]
    assert {drop.reason for drop in drops} <= {"surplus"}
    oldest = [
        max(member.staleness for group in event.groups for member in group.members)
        for event in ledger
        if isinstance(event, BatchCut)
    ]
    assert max(oldest[-3:]) <= after


@pytest.mark.parametrize("limit", [0, 2])
def test_admission_never_lets_more_groups_be_open_than_the_limit_allows(tmp_path, limit):
    world = World(tmp_path, limit=limit, data_epochs=None, steps=8)
    choose, most = random.Random(5), 0
    try:
        for _ in range(20_000):
            world.move(choose.choice(world.names))
            feeder = world.stages.get("feeder")
            if feeder is not None:
                most = max(most, feeder.open_groups)
                if feeder.ledger.finished is not None:
                    break
        audit(world)
    finally:
        world.close()
    assert most == (limit + 1) * world.batch


def test_two_feeders_alive_at_once_train_nothing_twice(tmp_path):
    world = World(tmp_path, limit=1)
    choose = random.Random(11)
    try:
        first = world._make("feeder")
        ledger = None
        for _ in range(300):  # both think that they are the feeder
            first.round()
            world.move(choose.choice(world.names))
        ledger = world.run(choose)
        audit(world)
    finally:
        world.close()
    assert ledger.finished is not None
