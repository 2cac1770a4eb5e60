"""Partitions that move between live replicas while they work (DESIGN §4): nothing is lost, nothing is trained twice.

Two reward stages and two collectors at once, each with a log of its own whose appends land late; any partition may
move at any time, also back again before its owner has looked, and any stage may be thrown away.
"""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.collector import Collector
from consumers.ledger import Ledger
from consumers.reward import RewardStage
from tests.properties.test_run_under_faults import audit
from tests.support.shares import LateLog, SharedStore
from tests.support.world import World

MOST_MOVES = 30_000
MOST_SHARE_MOVES = 400  # then rest: who never has a partition for as long as a deadline judges nobody late


class SharedWorld(World):
    """`reward-0`, `reward-1`, `collector-0` and `collector-1` share their partitions; the rest is World's."""

    def __init__(self, folder: Path, **options) -> None:
        self.store = SharedStore()
        self.handles: list[LateLog] = []
        super().__init__(folder, log=LateLog(self.store), partitions=4, **options)

    @property
    def names(self) -> list[str]:
        others = [name for name in super().names if name not in ("reward", "collector")]
        return [*others, "reward-0", "reward-1", "collector-0", "collector-1"]

    def _make(self, name: str):
        role, _, replica = name.partition("-")
        if role not in ("reward", "collector"):
            return super()._make(name)
        log = LateLog(self.store, late=True)
        self.handles.append(log)
        if role == "reward":
            stage = RewardStage(log, self.topics, self.pool, replica=int(replica), replicas=2)
        else:
            stage = Collector(
                log,
                self.topics,
                member_deadline=timedelta(seconds=self.patience),
                monotonic=lambda: self.moves,
                replica=int(replica),
                replicas=2,
            )
        stage.start()
        return stage

    def run_shared(self, choose: random.Random, *, move_rate: float, crash_rate: float) -> Ledger:
        ledger = Ledger(self.log, self.topics)
        for _ in range(MOST_MOVES):
            name = choose.choice(self.names)
            self.move(name)
            for log in self.handles:
                if choose.random() < 0.3:
                    log.deliver(choose.randrange(1, 4))
            if choose.random() < move_rate and self.share_moves < MOST_SHARE_MOVES:
                for shares in self.store.groups.values():
                    shares.move(choose)
            if choose.random() < crash_rate and self.crashes < 20:
                self.crash(name)
            ledger.catch_up()
            if ledger.finished is not None:
                return ledger
        raise AssertionError(f"not finished after {MOST_MOVES} moves: {self.state(ledger)}")

    @property
    def share_moves(self) -> int:
        return sum(shares.moves for shares in self.store.groups.values())


@given(
    seed=st.integers(0, 2**32),
    move_rate=st.sampled_from([0.02, 0.1, 0.3]),
    crash_rate=st.sampled_from([0.0, 0.01]),
)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_every_group_ends_exactly_once_however_the_partitions_move(seed, move_rate, crash_rate):
    choose = random.Random(seed)
    with TemporaryDirectory() as folder:
        world = SharedWorld(
            Path(folder),
            limit=1,
            rows=8,
            patience=100,
            loses=lambda uid: random.Random(f"{seed}lose{uid}").random() < 0.03,
            doubles=lambda uid: random.Random(f"{seed}double{uid}").random() < 0.2,
        )
        try:
            world.run_shared(choose, move_rate=move_rate, crash_rate=crash_rate)
            happened = audit(world)
        finally:
            world.close()
    assert happened["outcomes"] == 16
    assert world.share_moves > 0
