"""A run with a teacher under random schedules, crashes and doubled samples: every trained sample has its own scores."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.enrichers.teacher import Refused
from consumers.staleness import Lineage
from engine.interfaces import Inputs
from engine.trainer.payloads import Payloads, train_batch
from streams.events import BatchCut, GroupsDropped, TeacherFailed, TeacherScored
from tests.properties.test_run_under_faults import audit, valid_ledger
from tests.support.events import events
from tests.support.world import World

SLOW = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


class Fussy:
    """Scores a token by its id, and refuses samples of some prompts."""

    name = "fussy"

    def __init__(self, fussy: set[int]) -> None:
        self.fussy = fussy

    def score(self, payloads):
        return [
            Refused("too_long", "not this one")
            if int(payload.prompt_ids[-1]) in self.fussy
            else scores_of(payload)[payload.loss_mask]
            for payload in payloads
        ]


def scores_of(payload):
    return np.where(payload.loss_mask, -(payload.response_ids + payload.prompt_ids[-1]) / 8, 0).astype(
        np.float32
    )


@given(seed=st.integers(0, 2**32), crash_rate=st.sampled_from([0.0, 0.02, 0.1]))
@SLOW
def test_no_sample_is_trained_without_its_own_scores_and_no_group_is_lost(seed, crash_rate):
    choose = random.Random(seed)
    teacher = Fussy({seed % 12, (seed + 5) % 12})
    with TemporaryDirectory() as folder:
        world = World(
            Path(folder),
            limit=2,
            teacher=teacher,
            doubles=lambda uid: random.Random(f"{seed}double{uid}").random() < 0.2,
        )
        try:
            world.run(choose, crash_rate=crash_rate)
            audit(world)
            ledger = valid_ledger(world)
            cuts = [event for event in ledger if isinstance(event, BatchCut)]
            payloads = Payloads(world.log, world.topics)
            trained = [
                sample
                for cut in cuts
                for sample in train_batch(cut, payloads, Lineage(), Inputs(with_teacher=True)).samples
            ]
            drops = {
                drop.seq: drop.reason
                for event in ledger
                if isinstance(event, (BatchCut, GroupsDropped))
                for drop in event.drops
            }
            said = [
                event
                for partition in range(world.topics.partitions)
                for event in events(world.log, world.topics, "rewards", partition)
                if isinstance(event, (TeacherScored, TeacherFailed))
            ]
        finally:
            world.close()
    for sample in trained:
        assert sample.teacher is not None
        assert sample.teacher.tolist() == scores_of(sample.payload).tolist()
    refused = {seq for seq, reason in drops.items() if reason == "teacher_too_long"}
    assert refused == teacher.fussy & set(range(12)), "and those alone are dropped for it"
    if not crash_rate:
        assert len(said) == len({event.uid for event in said}), "nothing is scored twice without a crash"
