"""Samples that are measured under the weights that sampled them: which, with what, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.telemetry import SUMS
from engine.interfaces import EngineError, TrainBatch, TrainSample
from engine.rollout.loading import on_disk
from engine.trainer.mismatch import DUE_AFTER, MismatchWatch, recall
from engine.trainer.probe import PROBED, probe
from engine.trainer.scoring import scorer
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from engine.weights.store import WeightStore, digest
from streams.events import SamplesProbed, StepMeasured, WeightsPublished
from streams.trajectory import Payload
from tests.engine.trainer_support import batch_of, folder_of, tiny_gpt2
from tests.support.events import events, put, run_log

A, B = ("rollout-0", "a1"), ("rollout-1", "b1")


def sample(uid: str, maker: tuple[str, str], *runs: tuple[int, int, int]) -> TrainSample:
    count = sum(n_tokens for _, _, n_tokens in runs)
    mask = np.ones(count, bool)
    payload = Payload(
        np.array([1], np.int32),
        np.arange(count, dtype=np.int32),
        np.zeros(count, np.float32),
        mask,
        list(runs),
        *maker,
    )
    return TrainSample(uid, payload, mask, 1.0)


def published(version: int, epoch: int = 1) -> WeightsPublished:
    return WeightsPublished(epoch=epoch, version=version, step=version, digest="d", uris={})


RECENT = [published(version) for version in range(3, 8)]


def rows(count: int, mean: float = 0.0, tokens: float = 10) -> np.ndarray:
    table = np.zeros((count, len(SUMS)))
    table[:, 0], table[:, 2] = tokens, mean * tokens
    return table


class Scores:
    """Remembers what it was asked."""

    def __init__(self, mean: float = 0.0) -> None:
        self.asked: list[tuple[int, list[str]]] = []
        self.mean = mean

    def __call__(self, weights: WeightsPublished, samples: Sequence[TrainSample]) -> np.ndarray:
        self.asked.append((weights.version, [each.uid for each in samples]))
        return rows(len(samples), self.mean)


def batch(*samples: TrainSample, step: int = 1) -> TrainBatch:
    return TrainBatch(step, 7, 0, list(samples))


# ---------------------------------------------------------------- which samples
def test_samples_of_one_version_are_measured_with_the_weights_of_that_version():
    score = Scores()
    mixed = sample("mixed", A, (1, 5, 1), (1, 6, 1))
    found = probe(
        score,
        batch(sample("a", A, (1, 6, 2)), sample("b", A, (1, 5, 2)), sample("c", B, (1, 5, 2)), mixed),
        MismatchWatch(None),
        RECENT,
    )
    assert score.asked == [(5, ["b", "c"])], "the version that most of them have, put in place once"
    assert found is not None and found.makers == [A, B]


def test_a_version_whose_file_may_be_gone_or_of_another_epoch_is_not_asked_for():
    score = Scores()
    assert (
        probe(score, batch(sample("a", A, (1, 2, 2)), sample("b", A, (9, 5, 2))), MismatchWatch(None), RECENT)
        is None
    )
    assert score.asked == []


def test_weights_that_cannot_be_read_are_no_fault_of_the_step():
    def gone(weights: WeightsPublished, samples: Sequence[TrainSample]) -> np.ndarray:
        raise EngineError("weights_unreadable", "removed")

    assert probe(gone, batch(sample("a", A, (1, 5, 2))), MismatchWatch(None), RECENT) is None


def test_an_incarnation_is_measured_until_it_can_be_judged_and_then_now_and_then():
    watch, score = MismatchWatch(0.1), Scores()
    many = [sample(f"s{place}", A, (1, 5, 2)) for place in range(2 * PROBED)]
    for step in range(1, 2 * DUE_AFTER + 3):
        found = probe(score, batch(*many, step=step), watch, RECENT)
        if found is not None:
            watch.add(step, found.makers, found.sums)
    assert [len(uids) for _, uids in score.asked] == [PROBED] * 3  # steps 1, 17 and 33
    fresh = probe(score, batch(sample("n", ("rollout-0", "a2"), (1, 5, 2)), step=34), watch, RECENT)
    assert fresh is not None and fresh.makers == [("rollout-0", "a2")], "the next incarnation is due at once"


def test_an_incarnation_whose_samples_compare_anyway_is_not_measured_again():
    watch = MismatchWatch(0.1)
    watch.add(4, [A] * 16, rows(16))
    assert probe(Scores(), batch(sample("a", A, (1, 5, 2)), step=5), watch, RECENT) is None


def test_what_was_measured_again_is_evidence_after_a_restart_too():
    log, topics = run_log()
    sampled = batch(*(sample(f"s{place}", A, (1, 5, 2)) for place in range(16)))
    found = probe(Scores(0.5), sampled, MismatchWatch(0.1), RECENT)
    assert found is not None
    step = StepMeasured(step=1, epoch=1, version=7, names=list(SUMS), n_samples=0, sums=b"")
    put(log, topics, "metrics", step)
    put(log, topics, "metrics", found.record(epoch=1, step=1, names=SUMS, at_ms=1))
    watch = MismatchWatch(0.1)
    recall(log, topics, [(1, 1)], watch)
    assert [(each.maker, each.mean) for each in watch.over()] == [(A, 0.5)]
    [_, record] = events(log, topics, "metrics")
    assert isinstance(record, SamplesProbed)
    assert (record.weights_epoch, record.version, record.uids[:2]) == (1, 5, ["s0", "s1"])


# ---------------------------------------------------------------- with a model
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tiny_gpt2(), tmp_path / "model")


def test_log_probs_under_an_older_version_are_those_of_that_version_and_the_model_is_as_it_was(
    folder, tmp_path
):
    backend = TorchBackend(folder, TorchSettings(lr=0.1))
    store = WeightStore(tmp_path / "run" / "weights", keep=10)
    first = store.publish(backend.weights(), epoch=1, version=0, step=0)
    work = batch_of(6)
    backend.step(work)
    as_trained = backend.trajectory_sums.copy()  # measured before the update: under version 0
    state = {name: tensor.clone() for name, tensor in backend.model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in backend.model.state_dict().items()}
    measured = scorer(backend, on_disk(tmp_path / "run"))(first, work.samples)
    unclipped = [place for place, name in enumerate(SUMS) if name != "n_clipped"]
    np.testing.assert_allclose(measured[:, unclipped], as_trained[:, unclipped], rtol=1e-5, atol=1e-6)
    for name, tensor in backend.model.state_dict().items():
        assert tensor.data_ptr() == places[name] and torch.equal(tensor, state[name]), name
    assert digest(backend.weights()) != first.digest, "the step had moved them"


def test_a_run_with_measured_samples_ends_with_the_bits_of_one_without(folder, tmp_path):
    digests = []
    for is_probed in (False, True):
        backend = TorchBackend(folder, TorchSettings(lr=0.1))
        store = WeightStore(tmp_path / f"run-{is_probed}" / "weights", keep=10)
        event = store.publish(backend.weights(), epoch=1, version=0, step=0)
        score = scorer(backend, on_disk(tmp_path / f"run-{is_probed}"))
        for step in range(1, 4):
            work = batch_of(6, seed=step, step=step)
            backend.step(work)
            if is_probed:
                score(event, work.samples)
        digests.append(digest(backend.weights()))
    assert digests[0] == digests[1]


def test_weights_that_are_not_what_was_published_are_not_put_in_place(folder, tmp_path):
    backend = TorchBackend(folder, TorchSettings(lr=0.1))
    store = WeightStore(tmp_path / "run" / "weights", keep=10)
    event = store.publish(backend.weights(), epoch=1, version=0, step=0)
    before = digest(backend.weights())
    (tmp_path / "run" / event.uris["disk"]).unlink()
    with pytest.raises(EngineError, match="weights_unreadable"):
        scorer(backend, on_disk(tmp_path / "run"))(event, batch_of(2).samples)
    assert digest(backend.weights()) == before


def test_scoring_that_runs_out_of_memory_is_no_fault_of_the_step_and_leaves_the_model_as_it_was(
    folder, tmp_path, monkeypatch
):
    backend, store = TorchBackend(folder, TorchSettings()), WeightStore(tmp_path / "weights", keep=9)
    moved = {name: value + 1 for name, value in backend.weights().items()}
    event = store.publish(moved, epoch=1, version=1, step=1)
    before = digest(backend.weights())

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(backend.policy, "score", no_room)
    with pytest.raises(EngineError, match="out of memory") as error:
        scorer(backend, on_disk(tmp_path))(event, batch_of(2).samples)
    assert error.value.reason == "probe_failed"
    assert digest(backend.weights()) == before
