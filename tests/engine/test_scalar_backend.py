"""The trainer of one number: whatever happens to a batch must show in its bits."""

from pathlib import Path

import numpy as np
import pytest

from engine.interfaces import BadStep, CheckpointError, TrainBatch, TrainSample
from engine.trainer.scalar_backend import ScalarBackend
from streams.trajectory import Payload


def sample(number: int, advantage: float | None = None, masked: bool = False) -> TrainSample:
    rng = np.random.default_rng(number)
    mask = np.array([True, False, True])
    payload = Payload(
        rng.integers(0, 50, 2, dtype=np.int32),
        rng.integers(0, 50, 3, dtype=np.int32),
        -rng.random(3, dtype=np.float32) * mask,
        mask,
        [(0, 1, 3)],
    )
    value = float(rng.normal()) if advantage is None else advantage
    return TrainSample(f"0-{number}/0/0", payload, mask & (not masked), value)


SAMPLES = [sample(number) for number in range(8)]


def bits_after(*batches: list[TrainSample], seed: int = 5) -> str:
    backend = ScalarBackend()
    for number, samples in enumerate(batches, 1):
        backend.step(TrainBatch(number, number - 1, seed, samples))
    return float(backend.weights()["w"][0]).hex()


def test_one_step_has_the_value_worked_out_by_hand():
    import math
    import zlib

    one = sample(3, advantage=1.0)
    checksum = zlib.crc32(b"5")
    for part in (
        b"0-3/0/0",
        np.array(1.0, "<f8").tobytes(),
        one.payload.prompt_ids.tobytes(),
        one.payload.response_ids.tobytes(),
        one.payload.logprobs.tobytes(),
        b"\x01\x00\x01",
    ):
        checksum = zlib.crc32(part, checksum)
    gradient = 1.125 * (0.5 + checksum / 2**32)
    want = 0.01 * (0.1 * gradient) / (math.sqrt(0.05 * gradient**2) + 1)
    assert float.fromhex(bits_after([one])) == pytest.approx(want, rel=1e-14)


def test_same_batches_give_the_same_bits():
    assert bits_after(SAMPLES, SAMPLES[:3]) == bits_after(list(SAMPLES), SAMPLES[:3])


@pytest.mark.parametrize("steps", [1, 2])
def test_lost_doubled_moved_or_altered_samples_change_the_bits(steps: int):
    def after(samples: list[TrainSample], seed: int = 5) -> str:
        return bits_after(*[SAMPLES] * (steps - 1), samples, seed=seed)

    first, second, *rest = SAMPLES
    payload = first.payload
    louder = payload.logprobs.copy()
    louder[2] = np.nextafter(louder[2], np.float32(0))
    other_ids = payload.response_ids.copy()
    other_ids[0] += 1
    changed = [
        [second, *rest],  # lost
        [first, first, second, *rest],  # doubled
        [first, *SAMPLES[:1], *rest],  # replaced by a neighbour
        [second, first, *rest],  # moved
        [first._replace(payload=payload._replace(logprobs=louder)), second, *rest],
        [first._replace(payload=payload._replace(response_ids=other_ids)), second, *rest],
        [first._replace(advantage=float(np.nextafter(first.advantage, 9))), second, *rest],
        [first._replace(loss_mask=np.array([True, False, False])), second, *rest],
        [first._replace(uid="0-0/0/1"), second, *rest],
    ]
    results = [after(SAMPLES), after(SAMPLES, seed=6), *map(after, changed)]
    assert len(set(results)) == len(results)


def test_a_sample_without_advantage_still_counts():
    still = [sample(1, advantage=0.0), sample(2, advantage=0.0)]
    assert len({bits_after(still), bits_after(still[:1]), bits_after(still[::-1])}) == 3


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([sample(1), sample(2, advantage=float("nan"))], "nonfinite_loss"),
        ([sample(1, masked=True)], "no_trainable_tokens"),
        ([], "no_trainable_tokens"),
    ],
)
def test_a_bad_step_leaves_every_bit_as_it_was(samples: list[TrainSample], reason: str, tmp_path: Path):
    backend = ScalarBackend()
    backend.step(TrainBatch(1, 0, 5, SAMPLES))
    backend.snapshot()(tmp_path)
    before = (tmp_path / "scalar.json").read_bytes()
    with pytest.raises(BadStep) as caught:
        backend.step(TrainBatch(2, 1, 5, samples))
    assert caught.value.reason == reason
    backend.snapshot()(tmp_path)
    assert (tmp_path / "scalar.json").read_bytes() == before


def test_a_loaded_state_goes_on_with_the_same_bits(tmp_path: Path):
    backend, other = ScalarBackend(), ScalarBackend(initial=3.0)
    backend.step(TrainBatch(1, 0, 5, SAMPLES))
    backend.snapshot()(tmp_path)
    other.load(tmp_path)
    for each in (backend, other):
        each.step(TrainBatch(2, 1, 6, SAMPLES[2:]))
    assert backend.weights()["w"].tobytes() == other.weights()["w"].tobytes()
    assert backend.weights()["w"].dtype == np.float64


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"w": "0x1p0"}', '{"w": 1, "mean": 2, "square": 3, "steps": 4}']
)
def test_a_damaged_state_is_refused_and_changes_nothing(text: str | None, tmp_path: Path):
    if text is not None:
        (tmp_path / "scalar.json").write_text(text)
    backend = ScalarBackend(initial=2.0)
    with pytest.raises(CheckpointError, match=r"scalar\.json"):
        backend.load(tmp_path)
    assert backend.weights()["w"].tolist() == [2.0]


def test_the_metrics_say_how_much_was_trained_on():
    metrics = ScalarBackend().step(TrainBatch(1, 0, 5, SAMPLES))
    assert metrics["n_tokens"] == 16 and metrics["grad_norm"] == abs(metrics["loss"]) > 0
    assert metrics["seconds"] >= 0
