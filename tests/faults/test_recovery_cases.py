"""Named cases of recovery (O22, O23, O24, O28 on disk, O32): what real systems lost or confused after a crash."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from engine.interfaces import EngineError
from engine.roles import open_run_log, topics_of
from engine.rollout.scripted import scripted_engine
from engine.weights.store import WeightStore
from replay.ledger import read_run
from replay.verify import verify
from streams.events import BatchCut, CheckpointSaved, EpochStarted, WeightsPublished
from tests.faults.harness import begin, configuration, read_view, supervised
from tests.support.events import events
from tests.support.world import World

SOON = timedelta(seconds=10)
LONGEST_S = 60.0


def test_o22_finished_but_untrained_work_is_not_lost_on_resume(tmp_path: Path) -> None:
    """Prompts 0 to 7, four at a time, two a step; everything is killed once step 1 is cut, with finished groups in the
    queue and others in flight. Each prompt is trained once and only once, in order: no window is skipped."""
    config = configuration(
        tmp_path,
        data={"epochs": 1, "shuffle": False},
        trainer={"rollout_batch_size": 2},
        staleness={"max_weight_staleness": 1},
        rollout={"replicas": 1, "n_samples_per_prompt": 2},
        reward={"replicas": 1},
        checkpoint={"every": 1},
    )
    rows = [json.dumps({"prompt": f"q{i}", "label": "yes"}) + "\n" for i in range(8)]
    Path(config.data.path).write_text("".join(rows))
    begin(config)
    killed = False
    with supervised(config) as launcher:
        deadline = time.monotonic() + LONGEST_S
        while not launcher.ended:
            assert time.monotonic() < deadline, f"the run does not end; logs in {config.run.dir}/logs"
            if not killed and read_view(config).step >= 1:
                for pid in filter(None, map(launcher.pid, launcher.names())):
                    os.kill(pid, signal.SIGKILL)
                killed = True
            time.sleep(0.01)
    with open_run_log(config, readonly=True) as log:
        assert verify(log, topics_of(config)).holds
        view = read_run(log, topics_of(config))
    assert killed and len(view.epochs) == 2
    trained = [sorted(int(group.group_id.split("-")[1]) for group in cut.event.groups) for cut in view.cuts]
    assert sorted(row for step in trained for row in step) == list(range(8))
    assert trained[0] == [0, 1] or set(trained[0]) < {0, 1, 2, 3}, (
        "only what could be open was in the first step"
    )


def trained_world(folder: Path, steps: int, *, checkpoint_every: int) -> World:
    """A whole run in this process that has taken its steps and then lost its trainer to a crash."""
    world = World(folder, data_epochs=None, limit=2, batch=2, checkpoint_every=checkpoint_every)
    chance = random.Random(5)
    for _ in range(20_000):
        world.move(chance.choice(world.names))
        if "trainer" in world.stages and world.stages["trainer"].step >= steps:
            break
    trainer = world.stages["trainer"]
    trainer._publisher.flush(SOON)
    trainer._saver.flush(SOON)
    world.crash("trainer")
    return world


def test_o23_version_numbers_go_on_under_a_new_epoch(tmp_path: Path) -> None:
    """Checkpoint at 12, version 13 published, killed, resumed: the next version is 13 or above, of another epoch, and
    13 of the dead attempt counts as the same version only because its digest is."""
    world = trained_world(tmp_path, 13, checkpoint_every=12)
    try:
        before = [e for e in events(world.log, world.topics, "ledger") if isinstance(e, WeightsPublished)]
        assert before[-1].version >= 13
        again = world.trainer()
        again._publisher.flush(SOON)
        published = [e for e in events(world.log, world.topics, "ledger") if isinstance(e, WeightsPublished)]
        epochs = [e for e in events(world.log, world.topics, "ledger") if isinstance(e, EpochStarted)]
        again.close()
    finally:
        world.close()
    first = published[len(before)]
    assert len(epochs) == 2 and epochs[0].producer != epochs[1].producer
    assert first.version == before[-1].version and first.epoch > before[-1].epoch
    assert first.digest == before[-1].digest and first.forked_at == first.version
    assert [e.version for e in published] == sorted(e.version for e in published)


def test_o24_resume_passes_over_half_written_checkpoints_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 10 is whole, step 20 lacks a file, step 30 is cut short. Resume takes 10 and replays all after it."""
    world = trained_world(tmp_path, 31, checkpoint_every=10)
    try:
        written = events(world.log, world.topics, "ledger")
        saved = {e.step: tmp_path / e.path for e in written if isinstance(e, CheckpointSaved)}
        last = [e for e in written if isinstance(e, BatchCut)][-1]
        final = [e for e in written if isinstance(e, WeightsPublished)][-1]
        (saved[20] / "state" / "scalar.json").unlink()
        content = (saved[30] / "state" / "scalar.json").read_bytes()
        (saved[30] / "state" / "scalar.json").write_bytes(content[:-7])
        with caplog.at_level(logging.INFO):
            again = world.trainer()
        again._publisher.flush(SOON)
        state = (again.step, again.version)
        published = [e for e in events(world.log, world.topics, "ledger") if isinstance(e, WeightsPublished)]
        again.close()
    finally:
        world.close()
    warnings = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert len(warnings) == 2
    assert "step 30 passed over: state/scalar.json has" in warnings[0]
    assert "step 20 passed over: state/scalar.json is missing" in warnings[1]
    assert "checkpoint of step 10 (version 10) loaded" in caplog.text
    assert state == (last.step, final.version)
    assert published[-1].digest == final.digest


def test_o28_a_damaged_transfer_is_never_served(tmp_path: Path) -> None:
    """One byte of version 5 is wrong on its way: the engine refuses it whole, holds no mixture, and serves 5 only once
    the digest of what it holds is the trainer's."""
    store = WeightStore(tmp_path / "weights", keep=5)
    old = store.publish({"w": np.arange(8.0)}, epoch=0, version=4, step=4)
    new = store.publish({"w": np.arange(8.0) + 1}, epoch=0, version=5, step=5)
    path = store.path(0, 5)
    right = path.read_bytes()
    wrong = right[:-3] + bytes([right[-3] ^ 1]) + right[-2:]

    async def transfer() -> None:
        engine = scripted_engine({"policy": "coin"}, name="e1", seed=0, pause_mode="retract")
        await engine.update(old, store.path(0, 4))
        path.write_bytes(wrong)
        with pytest.raises(EngineError, match="weights_mismatch"):
            await engine.update(new, path)
        assert engine.held is None or engine.held.version == 4
        path.write_bytes(right)
        await engine.update(new, path)
        assert engine.held is not None
        assert (engine.held.version, engine.held.digest) == (5, new.digest)
        await engine.close()

    asyncio.run(transfer())


def test_o32_a_checkpoint_without_its_optimizer_is_never_resumed_with_a_fresh_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer part of the newest checkpoint is gone. Recovery falls back to what is whole and replays, so the
    moments are those of the unbroken run: the step after it gives the same bits. (Torch: tests/engine/
    test_torch_backend.py, where a fresh optimizer has to be asked for by name.)"""
    world = trained_world(tmp_path, 5, checkpoint_every=5)
    try:
        written = events(world.log, world.topics, "ledger")
        (saved,) = [e for e in written if isinstance(e, CheckpointSaved)]
        state = tmp_path / saved.path / "state" / "scalar.json"
        parts = json.loads(state.read_text())
        del parts["mean"], parts["square"]
        state.write_text(json.dumps(parts))
        final = [e for e in written if isinstance(e, WeightsPublished)][-1]
        again = world.trainer()
        again._publisher.flush(SOON)
        published = [e for e in events(world.log, world.topics, "ledger") if isinstance(e, WeightsPublished)]
        steps = again.backend._steps  # pyright: ignore[reportAttributeAccessIssue]
        again.close()
    finally:
        world.close()
    assert "passed over" in caplog.text
    assert published[-1].digest == final.digest
    assert steps == final.step
