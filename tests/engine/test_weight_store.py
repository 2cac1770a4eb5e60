"""Digests, published files and their transport. Torch appears only to show that it gives the same as numpy."""

import builtins
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from engine.weights import store as store_module
from engine.weights.store import (
    WeightsConflict,
    WeightsError,
    WeightStore,
    digest,
    read,
    snapshot,
    verify,
)
from streams.events import TensorInfo

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1.5, -0.0], np.float64),
    "n": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "flags": np.array([True, False, True]),
}


@pytest.fixture(params=["small", "large"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> WeightStore:
    """Large versions are written while they are digested; nobody can tell by what comes of it."""
    if request.param == "large":
        monkeypatch.setattr(store_module, "_LARGE", 0)
    return WeightStore(tmp_path / "weights", keep=2, clock=lambda: 1234)


# ---------------------------------------------------------------- digest
def test_numpy_and_torch_give_equal_digests_for_equal_bits():
    tensors = {name: torch.from_numpy(array.copy()) for name, array in ARRAYS.items()}
    assert digest(ARRAYS) == digest(tensors)


def test_the_digest_is_this_very_value():
    # sha256 over (8-byte length of the head, head as JSON, sha256 of the bytes) per tensor in order of names:
    # worked out by hand once. Another value here means that runs of older versions can no longer be replayed.
    import hashlib

    whole = hashlib.sha256()
    for head, content in (
        (b'["a","F32",[2]]', np.array([1, 2], "<f4").tobytes()),
        (b'["b","BOOL",[]]', b"\x01"),
    ):
        whole.update(len(head).to_bytes(8, "little") + head + hashlib.sha256(content).digest())
    assert digest({"b": np.array(True), "a": np.array([1, 2], np.float32)}) == whole.hexdigest()


def test_bfloat16_has_a_digest_and_survives_the_file(store: WeightStore):
    tensors = {"w": torch.tensor([1.0, -2.5, 3.25], dtype=torch.bfloat16), "s": torch.tensor(0.5).bfloat16()}
    event = store.publish(tensors, epoch=0, version=1, step=1)
    held = read(store.path(0, 1), "torch")
    assert held["w"].dtype is torch.bfloat16 and held["w"].tolist() == [1.0, -2.5, 3.25]
    assert held["s"].shape == () and digest(held) == event.digest == digest(tensors)
    with pytest.raises(WeightsError, match="bfloat16, which numpy does not have"):
        read(store.path(0, 1), "numpy")


def test_the_digest_sees_every_name_dtype_shape_and_bit():
    base = digest(ARRAYS)
    flipped = ARRAYS["b"].copy()
    flipped[1, 2] = np.nextafter(flipped[1, 2], np.float32(9))
    for change in (
        {"b": flipped},
        {"b": ARRAYS["b"].reshape(3, 2)},
        {"b": ARRAYS["b"].view(np.int32)},
        {"a": np.array([1.5, 0.0])},  # 0.0 is not -0.0
        {"new": np.zeros(1)},
    ):
        assert digest(ARRAYS | change) != base
    renamed = {("c" if name == "b" else name): array for name, array in ARRAYS.items()}
    assert digest(renamed) != base


def test_layout_and_order_leave_the_digest_as_it_is():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    want = digest({"x": matrix, "y": np.ones(2)})
    assert digest({"y": np.ones(2), "x": np.asfortranarray(matrix)}) == want
    assert digest({"x": torch.from_numpy(matrix.T.copy()).T, "y": torch.ones(2, dtype=torch.float64)}) == want
    assert digest({"x": matrix.astype(">f4"), "y": np.ones(2)}) == want


def test_large_tensors_hashed_on_threads_give_the_same_digest(monkeypatch: pytest.MonkeyPatch):
    tensors = {f"t{i}": np.full(1000, i, np.float32) for i in range(9)}
    want = digest(tensors)
    monkeypatch.setattr("engine.weights.tensors._THREADS_FROM_BYTES", 0)
    assert digest(tensors) == want


def test_numpy_weights_never_import_torch(tmp_path: Path):
    code = (
        "import sys, numpy as np, pathlib\n"
        "from engine.weights.store import WeightStore, read, snapshot\n"
        "from engine.trainer.scalar_backend import ScalarBackend\n"
        f"store = WeightStore(pathlib.Path({str(tmp_path)!r}) / 'w', keep=1)\n"
        "store.publish(snapshot(ScalarBackend().weights()), epoch=0, version=0, step=0)\n"
        "read(store.path(0, 0), 'numpy')\n"
        "assert 'torch' not in sys.modules\n"
    )
    root = Path(store_module.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


# ---------------------------------------------------------------- files
def test_a_published_file_holds_what_the_event_says(store: WeightStore):
    event = store.publish(ARRAYS, epoch=3, version=7, step=9)
    assert (event.epoch, event.version, event.step, event.kind) == (3, 7, 9, "full")
    assert event.uris == {"disk": "weights/e3-v7.safetensors"} and event.published_ms == 1234
    assert event.tensors[0] == TensorInfo("b", [2, 3], "F32", 24)
    assert event.nbytes == 24 + 16 + 8 + 0 + 3
    held = store.read(store.path(3, 7), "numpy")
    assert set(held) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert held[name].dtype == array.dtype and held[name].shape == array.shape
        assert held[name].tobytes() == array.tobytes()
    store.verify(store.path(3, 7), event.digest)
    assert [path.name for path in store.folder.iterdir()] == ["e3-v7.safetensors"]


def test_other_safetensors_readers_open_the_file(store: WeightStore):
    event = store.publish(ARRAYS, epoch=3, version=7, step=9)
    path = store.path(3, 7)
    assert digest(safetensors.numpy.load_file(path)) == event.digest
    assert digest(safetensors.torch.load_file(path)) == event.digest
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt", "epoch": "3", "version": "7", "digest": event.digest}


def test_equal_weights_give_equal_files(tmp_path: Path):
    for name in ("one", "two"):
        WeightStore(tmp_path / name, keep=1).publish(snapshot(ARRAYS), epoch=0, version=0, step=0)
    one, two = (tmp_path / name / "e0-v0.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_changing_what_was_read_changes_no_file(store: WeightStore):
    store.publish(ARRAYS, epoch=0, version=0, step=0)
    before = store.path(0, 0).read_bytes()
    held = read(store.path(0, 0), "torch")
    held["b"].add_(1)
    assert held["b"][0, 0] == 1 and store.path(0, 0).read_bytes() == before


def test_tied_weights_are_stored_once_and_come_back_tied(store: WeightStore):
    embedding = torch.arange(8.0).reshape(4, 2)
    tensors = {"wte.weight": embedding, "norm": torch.ones(2), "head.weight": embedding}
    event = store.publish(tensors, epoch=0, version=1, step=1)
    assert event.nbytes == 32 + 8 and [info.name for info in event.tensors] == list(tensors)
    assert [info.tied for info in event.tensors] == ["", "", "wte.weight"]
    with safetensors.safe_open(store.path(0, 1), "numpy") as file:
        assert sorted(file.keys()) == ["norm", "wte.weight"]
    held = read(store.path(0, 1), "torch")
    assert held["head.weight"].data_ptr() == held["wte.weight"].data_ptr()
    copied = {name: tensor.clone() for name, tensor in tensors.items()}
    assert digest(held) == event.digest == digest(copied)
    # a view of the same memory with another shape is not the same tensor
    assert store.publish({"x": embedding, "y": embedding.T}, epoch=0, version=2, step=2).nbytes == 64


def test_a_snapshot_does_not_change_with_its_source_and_keeps_ties():
    embedding = torch.ones(3)
    taken = snapshot({"a": embedding, "b": embedding, "c": embedding.clone()})
    arrays = snapshot({"w": (source := np.zeros(2))})
    embedding.add_(1)
    source += 1
    assert taken["a"].tolist() == [1, 1, 1] and arrays["w"].tolist() == [0, 0]
    assert taken["a"] is taken["b"] and taken["a"] is not taken["c"]


def test_publishing_the_same_weights_again_writes_nothing(store: WeightStore):
    first = store.publish(ARRAYS, epoch=1, version=2, step=2)
    inode = store.path(1, 2).stat().st_ino
    again = store.publish(snapshot(ARRAYS), epoch=1, version=2, step=2)
    assert again == first and store.path(1, 2).stat().st_ino == inode


def test_other_weights_never_overwrite_a_published_file(store: WeightStore):
    store.publish(ARRAYS, epoch=1, version=2, step=2)
    before = store.path(1, 2).read_bytes()
    with pytest.raises(WeightsConflict, match="holds other weights"):
        store.publish(ARRAYS | {"a": np.zeros(2)}, epoch=1, version=2, step=2)
    assert store.path(1, 2).read_bytes() == before


def test_a_damaged_file_fails_its_digest_and_is_written_again(
    store: WeightStore, caplog: pytest.LogCaptureFixture
):
    event = store.publish(ARRAYS, epoch=1, version=2, step=2)
    path = store.path(1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WeightsError, match=f"expected {event.digest}"):
        verify(path, event.digest)
    store.publish(ARRAYS, epoch=1, version=2, step=2)
    assert path.read_bytes() == whole and "damaged" in caplog.text


@pytest.mark.parametrize("size", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_refused_with_a_reason(store: WeightStore, size: int):
    store.publish(ARRAYS, epoch=1, version=2, step=2)
    path = store.path(1, 2)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError, match=r"truncated|damaged"):
        read(path, "numpy")


def test_a_header_that_points_outside_is_refused(store: WeightStore):
    store.publish({"w": np.ones(4)}, epoch=0, version=0, step=0)
    path = store.path(0, 0)
    path.write_bytes(path.read_bytes().replace(b'"data_offsets":[0,32]', b'"data_offsets":[8,40]'))
    with pytest.raises(WeightsError, match="w takes bytes 0 to 32, the header says 8 to 40"):
        read(path, "numpy")


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"gone\.safetensors: cannot be read"):
        read(tmp_path / "gone.safetensors", "numpy")


def test_a_full_disk_gives_a_clear_error_and_leaves_nothing(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match="no room on the disk"):
        store.publish(ARRAYS, epoch=0, version=1, step=1)
    assert list(store.folder.iterdir()) == []
    monkeypatch.undo()
    store.publish(ARRAYS, epoch=0, version=1, step=1)
    assert store.versions() == [(0, 1)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_while_writing_gives_the_same_error(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    opened = builtins.open

    def onto_full_device(path, mode="r", *args, **kwargs):
        return opened("/dev/full" if mode == "wb" else path, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", onto_full_device)
    with pytest.raises(WeightsError, match="no room on the disk"):
        store.publish({"w": np.zeros(100_000)}, epoch=0, version=1, step=1)
    assert list(store.folder.iterdir()) == []


def test_an_object_without_bytes_is_refused(store: WeightStore):
    with pytest.raises(WeightsError, match="got list"):
        store.publish({"w": [1.0]}, epoch=0, version=0, step=0)
    with pytest.raises(WeightsError, match="dtype complex128"):
        store.publish({"w": np.zeros(1, np.complex128)}, epoch=0, version=0, step=0)


# ---------------------------------------------------------------- removal
def test_prune_keeps_the_newest_and_what_is_pinned(store: WeightStore):
    for epoch, version in ((0, 8), (0, 9), (0, 10), (5, 9), (5, 10)):
        store.publish({"w": np.array([version])}, epoch=epoch, version=version, step=version)
    removed = store.prune(pinned=["weights/e0-v9.safetensors"])
    assert [path.name for path in removed] == ["e0-v8.safetensors", "e0-v10.safetensors"]
    assert store.versions() == [(0, 9), (5, 9), (5, 10)]
    assert store.prune() == [store.path(0, 9)]


def test_prune_removes_what_killed_trainers_left_but_nothing_in_the_making(store: WeightStore):
    store.publish({"w": np.ones(1)}, epoch=5, version=1, step=1)
    left, making, other = (
        store.folder / name for name in (".e4-v2.safetensors.tmp", ".e5-v2.safetensors.tmp", "notes.txt")
    )
    for path in (left, making, other):
        path.write_bytes(b"")
    assert store.prune() == []
    assert not left.exists() and making.exists() and other.exists()


def test_a_store_outside_the_run_directory_publishes_absolute_paths(tmp_path: Path):
    run_dir, memory = tmp_path / "run", tmp_path / "memory"
    event = WeightStore(memory, keep=1, run_dir=run_dir).publish(ARRAYS, epoch=0, version=0, step=0)
    assert event.uris == {"disk": str(memory / "e0-v0.safetensors")}
