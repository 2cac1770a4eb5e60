"""Hard prompts that never get trained are named (case O17), and a narrower admission trains them."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from consumers.dataset import Row, row_of
from consumers.feeder import Feeder
from consumers.starvation import Starvation, length_class
from engine.trainer.loop import Trainer
from replay.verify import verify
from streams import codec, trajectory
from streams.events import (
    BatchCut,
    CutGroup,
    CutMember,
    Drop,
    EpochStarted,
    GroupsDropped,
    InputProgress,
    Metrics,
    TaskDispatched,
    WeightsPublished,
)
from streams.trajectory import SampleData
from tests.support.events import completed, decoded, events, put, run_log
from tests.support.world import Rollout, Rows, World


# ---------------------------------------------------------------- the fold
def dropped(group_id: str, reason: str = "stale", seq: int = 0) -> GroupsDropped:
    return GroupsDropped(epoch=0, version=0, frontier=0, drops=[Drop(group_id, seq, reason)])


def used(group_id: str, n_tokens: int = 3, seq: int = 0) -> BatchCut:
    members = [CutMember(f"{group_id}/{index}/0", index, 0.0, 0, n_tokens - index) for index in range(2)]
    return BatchCut(
        epoch=0, version=0, step=1, groups=[CutGroup(group_id, seq, 0, 0, members)], positions=[0], frontier=0,
        limit=1, on_stale="drop", seed=0, ledger_read_to=0, cut_ms=0,
    )  # fmt: skip


def followed(*closings: BatchCut | GroupsDropped) -> Starvation:
    made = Starvation()
    for event in closings:
        made.closed(event)
    return made


def test_three_drops_as_stale_since_a_row_was_last_trained_starve_it():
    stale = [dropped(f"{data_epoch}-7") for data_epoch in range(4)]
    assert followed(*stale[:2]).starved == {}
    assert followed(*stale[:3]).starved == {7: ["0-7", "1-7", "2-7"]}
    assert followed(*stale[:2], used("2-7"), stale[3]).starved == {}
    assert followed(*stale[:3], used("3-7")).starved == {}, "it is trained again"
    assert followed(dropped("0-7"), dropped("0-8"), dropped("0-9")).starved == {}, "three rows"


def test_another_reason_neither_counts_nor_makes_up_for_a_drop():
    closings = [dropped("0-7"), dropped("1-7", "reward_timeout"), dropped("2-7"), dropped("3-7")]
    assert followed(*closings[:3]).starved == {}
    assert followed(*closings).starved == {7: ["0-7", "2-7", "3-7"]}


def test_shares_are_of_trained_groups_by_their_longest_sample():
    starvation = Starvation()
    long = completed(2)
    starvation.finished(long)  # three response tokens, however few of them are trained
    for event in (used("0-0", 30), used("0-1", 20), used("0-3", 100), used("0-2", 1, seq=2), dropped("0-4")):
        starvation.closed(event)
    assert starvation.trained_shares() == {"3-4": 0.25, "17-32": 0.5, "65-128": 0.25}


def test_a_length_belongs_to_one_class():
    assert [length_class(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 1024, 1025)] == [
        *("0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "513-1024", "1025-2048")
    ]


def test_the_first_starved_row_is_named_at_once_and_others_when_they_have_doubled():
    starvation, said = Starvation(), []
    for row in range(8):
        for data_epoch in range(3):
            starvation.closed(dropped(f"{data_epoch}-{row}"))
        said.append(starvation.warning(lambda row: f"prompt {row}"))
    assert [bool(text) for text in said] == [True, True, False, True, False, False, False, True]
    assert "row 0 (prompt 0), answers of unknown length, groups 0-0, 1-0, 2-0. What" in said[0]
    assert "row 2 (prompt 2)" in said[3] and "row 3 (prompt 3)" in said[3] and "; and 2 more" in said[3]
    assert starvation.warning(str) == ""


def test_a_row_is_read_from_an_id_that_a_feeder_gave():
    assert [row_of(group_id) for group_id in ("0-7", "12-345", "7", "a-b", "")] == [7, 345, None, None, None]


def test_a_feeder_that_restarts_knows_what_starves_and_its_metrics_say_how_much():
    log, topics = run_log()
    put(log, topics, "ledger", EpochStarted(producer="t", started_ms=0))
    put(log, topics, "ledger", WeightsPublished(epoch=0, version=0, step=0, digest="d", uris={}))
    for event in (dropped("0-1"), dropped("1-1"), used("0-0"), dropped("2-1")):
        put(log, topics, "ledger", event)
    rows = Rows([Row("easy", None, {}), Row("hard " * 30, None, {})])
    feeder = Feeder(log, topics, rows, rollout_batch_size=1, n_samples=2, limit=0)
    feeder.recover()
    feeder.round()
    (metrics,) = [event for event in events(log, topics, "metrics") if isinstance(event, Metrics)]
    assert metrics.values["starved"] == 1.0
    assert metrics.values["trained_length/3-4"] == 1.0
    assert feeder.starvation.starved == {1: ["0-1", "1-1", "2-1"]}


# ---------------------------------------------------------------- case O17, on a simulated clock
class Engine(Rollout):
    """`slots` tasks at a time, each begun with the weights published then; a tick is the time of one fast answer."""

    def __init__(self, world: Ticking, partition: int) -> None:
        super().__init__(world, partition)
        self.slots = world.slots
        self.running: list[tuple[int, TaskDispatched, int, WeightsPublished]] = []

    def tick(self, now: int) -> None:
        self.ledger.catch_up()
        for due, task, offset, published in self.running:
            if due <= now:
                self._finish(task, offset, published)
        self.running = [each for each in self.running if each[0] > now]
        published = self.ledger.published
        assert published is not None
        while len(self.running) < self.slots:
            batch = self.world.log.read(
                self.world.topics.name("tasks"), self.partition, self.position, max_records=1
            )
            task = decoded(batch.records[0]) if batch.records else None
            if not isinstance(task, TaskDispatched) or published.version < task.min_version:
                break
            self.position = batch.next_position
            took = 3 if task.prompt == "slow" else 1
            self.running.append((now + took, task, batch.records[0].offset, published))

    def _finish(self, task: TaskDispatched, offset: int, published: WeightsPublished) -> None:
        n_tokens = 30 if task.prompt == "slow" else 10
        for index in range(task.n_samples):
            sample = SampleData(
                uid=f"{task.group_id}/{index}/0",
                group_id=task.group_id,
                seq=task.seq,
                index=index,
                attempt=0,
                n_samples=task.n_samples,
                task_offset=offset,
                prompt_ids=[1],
                response_ids=[7] * n_tokens,
                logprobs=[-0.5] * n_tokens,
                loss_mask=[1] * n_tokens,
                versions=[(published.epoch, published.version, n_tokens)],
                finish_reason="stop",
                response=str(index),
                label="1",
            )
            progress = {"tasks": InputProgress(offset + 1, offset, [])}
            record = codec.encode(trajectory.pack(sample, progress=progress), producer="rollout")
            self.world.log.append(self.world.topics.name("trajectories"), self.partition, [record])


class Ticking(World):
    """Eight prompts, the last of which takes three ticks; the trainer takes at most one step a tick."""

    def __init__(self, folder: Path, *, slots: int, feeder_limit: int, max_open_groups: int | None) -> None:
        super().__init__(folder, partitions=1, data_epochs=None, batch=4, limit=1, patience=1e9)
        self.rows = Rows([Row(prompt, "1", {}) for prompt in (*"abcdefg", "slow")])
        self.slots, self.feeder_limit, self.max_open_groups = slots, feeder_limit, max_open_groups

    def _make(self, name: str):
        if name.startswith("rollout"):
            return Engine(self, 0)
        if name != "feeder":
            return super()._make(name)
        feeder = Feeder(
            self.log,
            self.topics,
            self.rows,
            rollout_batch_size=self.batch,
            n_samples=self.n_samples,
            limit=self.feeder_limit,
            max_open_groups=self.max_open_groups,
            shuffle=False,
        )
        feeder.recover()
        return feeder

    def tick(self, now: int) -> None:
        self.move("feeder")
        self.stages["rollout-0"].tick(now)
        for name in ("reward", "collector"):
            while self.move(name):
                pass
        trainer: Trainer = self.stages["trainer"]
        step = trainer.step
        while self.move("trainer") and trainer.step == step:
            pass  # it may have to write drops first
        self.move("feeder")

    def until_step(self, step: int) -> None:
        for name in ("trainer", "feeder"):
            self.move(name)
        self.stages["rollout-0"] = self._make("rollout-0")
        for now in range(400):
            if self.stages["trainer"].step >= step:
                return
            self.tick(now)
        raise AssertionError(f"step {step} was not reached")

    def outcomes(self) -> tuple[Counter[str], Counter[str]]:
        """Trained groups, and groups dropped as stale, of each prompt."""
        ledger = events(self.log, self.topics, "ledger")
        trained = [
            group.group_id for event in ledger if isinstance(event, BatchCut) for group in event.groups
        ]
        stale = [
            drop.group_id
            for event in ledger
            if isinstance(event, (BatchCut, GroupsDropped))
            for drop in event.drops
            if drop.reason == "stale"
        ]
        assert verify(self.log, self.topics).holds
        return Counter(map(self._prompt, trained)), Counter(map(self._prompt, stale))

    def _prompt(self, group_id: str) -> str:
        row = row_of(group_id)
        assert row is not None
        return self.rows.rows[row].prompt


FAIR = 40 * 4 / 8  # groups of one prompt, if all were trained alike


@pytest.mark.parametrize(("max_open_groups", "drops"), [(4, 0), (6, 0), (None, 9)])
def test_paced_admission_trains_the_slow_prompt_at_half_of_a_fair_share_or_more(
    tmp_path, caplog, max_open_groups, drops
):
    """With the whole gate, (1 + 1) × 4, two steps may go by while the slow one is generated, and some of its groups are
    too old then; a gate below that leaves no room for a second step."""
    world = Ticking(tmp_path, slots=99, feeder_limit=1, max_open_groups=max_open_groups)
    try:
        world.until_step(40)
        trained, stale = world.outcomes()
    finally:
        world.close()
    assert trained["slow"] >= FAIR / 2
    assert (stale["slow"], stale.total()) == (drops, drops)
    assert "starved" not in caplog.text


def test_without_pacing_the_starved_prompt_is_named_after_three_tries(tmp_path, caplog):
    world = Ticking(
        tmp_path, slots=6, feeder_limit=4, max_open_groups=None
    )  # a gate far wider than the limit
    caplog.set_level(logging.WARNING)
    try:
        world.until_step(40)
        trained, stale = world.outcomes()
        starvation = world.stages["feeder"].starvation
    finally:
        world.close()
    assert trained["slow"] == 0 and stale["slow"] > 20
    (said,) = [record.message for record in caplog.records if "starved" in record.message]
    assert "row 7 ('slow'), answers of 17-32 tokens, groups 0-7, 1-7, 2-7" in said
    assert "9-16 tokens 100%" in said and "millstream staleness CONFIG --set K" in said
    assert list(starvation.starved) == [7]
    assert starvation.trained_shares() == {"9-16": 1.0}
