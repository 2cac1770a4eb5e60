"""A run directory on the embedded log, written by the real trainer from groups that a test puts in by hand.

with RunDir(tmp_path / "run") as run:
    run.group(0); run.group(1); run.settle()        # step 1 is cut, trained and published
main(["replay", str(run.path)])
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from consumers.ledger import Ledger
from engine.config import Config, build_config, dump_toml, fingerprint, load_config
from engine.interfaces import TrainerBackend
from engine.roles import trainer_backend
from engine.trainer.loop import Trainer
from engine.trainer.settings import LoopSettings
from engine.weights.store import WeightStore
from streams import codec, trajectory
from streams.embedded.log import EmbeddedLog
from streams.events import Event, GroupCompleted, Member
from streams.log import NewRecord, read_all
from streams.topics import Topics
from streams.trajectory import SampleData

Runs = list[tuple[int, int]]  # (version, tokens) of one sample
N_SAMPLES = 2


def configuration(path: Path, **sections: dict[str, Any]) -> Config:
    """Scalar trainer, two groups of two samples a step, a checkpoint every second step."""
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "small", "dir": str(path), "seed": 3},
        "log": {"partitions": 1},
        "data": {"path": "prompts.jsonl"},
        "reward": {"function": "exact"},
        "rollout": {"backend": "scripted", "n_samples_per_prompt": N_SAMPLES},
        "trainer": {"backend": "scalar", "rollout_batch_size": 2, "lr": 0.1},
        "staleness": {"max_weight_staleness": 2},
        "checkpoint": {"every": 2},
    }
    for name, values in sections.items():
        table.setdefault(name, {}).update(values)
    return build_config(table)


class RunDir:
    """`trainer` is the one now alive; `take_over` begins another epoch."""

    def __init__(self, path: Path, config: Config | None = None, **sections: dict[str, Any]) -> None:
        """`config`: of a directory that is there; else it is made, with these sections over the usual ones."""
        self.path = path
        self.config = config or configuration(path, **sections)
        path.mkdir(parents=True, exist_ok=config is not None)
        (path / "config.toml").write_text(dump_toml(self.config), encoding="utf-8")
        self.log = EmbeddedLog(path / "log", fsync="never")
        self.topics = Topics(self.config.run.name, 1)
        self.topics.create(self.log)
        self.trainer = self._trainer()
        self.epoch = self.trainer.epoch
        self._seq = 0

    @classmethod
    def reopen(cls, path: Path) -> RunDir:
        """A directory that is there; its trainer recovers, as another epoch."""
        return cls(path, load_config(path, environ={}))

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.close()
        self.log.close()

    def _trainer(self) -> Trainer:
        config = self.config
        settings = LoopSettings(
            run=config.run.name,
            config_fingerprint=fingerprint(config),
            seed=config.run.seed,
            rollout_batch_size=config.trainer.rollout_batch_size,
            n_samples_per_prompt=N_SAMPLES,
            max_weight_staleness=config.staleness.max_weight_staleness,
            on_stale=config.staleness.on_stale,
            update_weights_interval=config.weights.update_weights_interval,
            checkpoint_every=config.checkpoint.every,
            checkpoint_keep_last=config.checkpoint.keep_last,
        )
        store = WeightStore(self.path / "weights", keep=50)
        trainer = Trainer(self.log, self.topics, self.backend(), store, settings, self.path / "checkpoints")
        trainer.start()
        self._flush(trainer)
        return trainer

    def backend(self) -> TrainerBackend:
        return trainer_backend(self.config)

    def take_over(self) -> Trainer:
        """A second trainer, from the log; returns the fenced one, which a test may let write on."""
        fenced, self.trainer = self.trainer, self._trainer()
        return fenced

    def group(
        self, *, rewards: tuple[float, float] = (0.0, 1.0), versions: Runs | None = None, epoch: int = -1
    ) -> int:
        """The next group, with payloads; `versions` are the runs of each sample (default: all of version 0)."""
        seq, self._seq = self._seq, self._seq + 1
        runs = [(self.epoch if epoch < 0 else epoch, *run) for run in versions or [(0, 4)]]
        length = sum(n_tokens for _, _, n_tokens in runs)
        members = []
        for index, reward in enumerate(rewards):
            sample = SampleData(
                uid=f"0-{seq}/{index}/0",
                group_id=f"0-{seq}",
                seq=seq,
                index=index,
                attempt=0,
                n_samples=N_SAMPLES,
                task_offset=seq,
                prompt_ids=[1, 2 + seq % 7],
                response_ids=[3 + (seq + index + place) % 9 for place in range(length)],
                logprobs=[-1.0 - 0.125 * ((seq + place) % 5) for place in range(length)],
                loss_mask=[1] * length,
                versions=runs,
                finish_reason="stop",
            )
            offset = self.put("trajectories", trajectory.pack(sample))
            members.append(
                Member(
                    uid=sample.uid,
                    index=index,
                    trajectory_offset=offset,
                    reward=reward,
                    trainable_versions=runs,
                )
            )
        self.put(
            "groups",
            GroupCompleted(
                group_id=f"0-{seq}", seq=seq, task_offset=seq, n_samples=N_SAMPLES, members=members
            ),
        )
        return seq

    def put(self, word: str, event: Event) -> int:
        return self.log.append(self.topics.name(word), 0, [codec.encode(event, producer="test")])

    def settle(self) -> None:
        for _ in range(50):
            moved = self.trainer.round()
            self._flush(self.trainer)
            if not moved:
                return
        raise AssertionError("the trainer never comes to rest")

    def steps(self, count: int, **group: Any) -> None:
        """That many steps of fresh groups, each sampled by the version before it."""
        for _ in range(count):
            for _ in range(self.config.trainer.rollout_batch_size):
                self.group(**{"versions": [(self.trainer.version, 4)], "epoch": self.trainer.epoch, **group})
            self.settle()

    @staticmethod
    def _flush(trainer: Trainer) -> None:
        trainer._publisher.flush(timedelta(seconds=30))
        trainer._saver.flush(timedelta(seconds=30))

    def history(self):
        return Ledger(self.log, self.topics).catch_up()


def copy_run(source: RunDir, path: Path, alter: Callable[[Event], Event | None]) -> None:
    """The run in another directory, each event as `alter` wants it; None: its record is left out.

    Its manifest stays, so nothing that the fingerprint covers may be altered.
    """
    path.mkdir()
    text = (source.path / "config.toml").read_text(encoding="utf-8").replace(str(source.path), str(path))
    (path / "config.toml").write_text(text, encoding="utf-8")
    with EmbeddedLog(path / "log", fsync="never") as log:
        source.topics.create(log)
        for topic in log.topics():
            for record in read_all(source.log, topic, 0, 0):
                decoded = codec.decode(record)
                assert isinstance(decoded, codec.Known)
                event = alter(decoded.event)
                if event is decoded.event:
                    log.append(topic, 0, [NewRecord(record.value, record.headers, record.timestamp_ms)])
                elif event is not None:
                    log.append(topic, 0, [codec.encode(event, producer="test")])


def contents(path: Path) -> dict[str, str]:
    """Every file below the folder, by the digest of its bytes."""
    return {
        each.relative_to(path).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(path.rglob("*"))
        if each.is_file()
    }
