"""Copies of weights for publication: where they are made, how many there are, and what they hold."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine.weights import snapshots  # noqa: E402
from engine.weights import tensors as files  # noqa: E402
from engine.weights.bucketing import side_by_side  # noqa: E402
from engine.weights.snapshots import DeviceSnapshot, Snapshots, raw_tensors  # noqa: E402


def weights() -> dict[str, Any]:
    tied = torch.randn(40, 3)
    return {
        "a": tied,
        "half": torch.randn(7, 5).bfloat16(),
        "tied": tied,
        "flags": torch.tensor([True, False, True]),
        "wide": torch.randn(3, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
    }


class Unready(DeviceSnapshot):
    """As one on a device, but in main memory and without its streams."""

    def __init__(self, tensors: Any) -> None:
        self._tensors, self.device = side_by_side(tensors), "cpu"


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_is_on_accelerator", bool)
    monkeypatch.setattr(snapshots, "_pinned", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))


def test_weights_in_main_memory_are_copied_there_whatever_was_asked_for() -> None:
    tensors = weights()
    right = files.digest(tensors)
    taken = Snapshots(on_device=True).take(tensors)
    tensors["a"].zero_()
    assert files.digest(taken) == right and taken["tied"].data_ptr() == taken["a"].data_ptr()


@pytest.mark.usefixtures("as_on_a_device")
def test_two_snapshots_are_on_the_device_at_the_most_and_no_room_there_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshots, "DeviceSnapshot", Unready)
    taking = Snapshots(on_device=True)
    first, second, third = (taking.take(weights()) for _ in range(3))
    assert [isinstance(each, Unready) for each in (first, second, third)] == [True, True, False]
    del first
    gc.collect()
    assert isinstance(taking.take(weights()), Unready)
    assert not isinstance(Snapshots(on_device=False).take(weights()), Unready)

    def full(tensors: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(snapshots, "DeviceSnapshot", full)
    taking = Snapshots(on_device=True)
    for _ in range(2):
        assert files.digest(taking.take(tensors := weights())) == files.digest(tensors)
    assert [record.getMessage() for record in caplog.records if "no room" in record.getMessage()] == [
        "trainer: the device has no room for a copy of the weights (0.0 GB); versions are copied to main memory while "
        "the trainer waits"
    ]


@pytest.mark.usefixtures("as_on_a_device")
def test_a_digest_of_portions_is_the_digest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {**weights(), "turned": torch.randn(5, 4).T}
    for portion in (1, 100, 1 << 20):
        monkeypatch.setattr(snapshots, "PORTION", portion)
        assert snapshots.digest(tensors) == files.digest(tensors)


def test_a_snapshot_whose_memory_is_copied_in_one_piece_has_the_same_bytes_and_ties() -> None:
    tensors = weights()
    snapshot = Unready(tensors)
    whole = snapshots._whole(snapshot._tensors)
    snapshot._host = snapshots._cut(snapshot._tensors, whole.clone().numpy(), whole.data_ptr())
    snapshot._copying = snapshots.threading.Lock()
    snapshot._module = None
    host = raw_tensors(snapshot)
    assert files.digest_raw(host) == files.digest(tensors)
    assert files.split_tied(host)[1] == {"tied": "a"}
