"""Deltas as files: what comes out is bit for bit what went in, or a refusal that says why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.weights import delta as reading
from engine.weights import delta_writer as writing
from engine.weights import tensors as files
from engine.weights.delta import Delta, WrongBase, apply, open_delta
from engine.weights.delta_writer import DeltaPolicy, FullIsDue, state_of, write_delta
from engine.weights.tensors import WeightsError, digest

DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int8": 1, "bool": 1,
}  # fmt: skip


def tensor_of(dtype: str, content: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    flat = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(getattr(torch, dtype)).reshape(shape)


def made(
    folder: Path, before: dict[str, Any], after: dict[str, Any], policy: DeltaPolicy | None = None
) -> Delta:
    path = folder / "e3-v7.delta"
    with open(path, "wb") as file:
        write_delta(
            file, state_of(before), state_of(after), epoch=3, version=7, base_version=6, policy=policy
        )
    return open_delta(path)


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        raw, expected = files.raw(found[name]), files.raw(tensor)
        assert (raw.dtype, raw.shape) == (expected.dtype, expected.shape), name
        assert raw.data.tobytes() == expected.data.tobytes(), name


BASE = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "n": np.array(7, np.int64),
    "empty": np.zeros((0, 4), np.float16),
    "still": np.ones(5, np.float64),
}
NEW = BASE | {
    "w": np.array([*range(9), np.nan, -0.0, 3], np.float32).reshape(3, 4),
    "n": np.array(8, np.int64),
}


# ---------------------------------------------------------------- bit for bit
@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    before, after = {}, {}
    for name in draw(st.lists(st.text("ab.", min_size=1, max_size=3), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        item = DTYPES[dtype]
        shape = draw(st.sampled_from([(), (0,), (3, 0), (1,), (5,), (4, 3), (40,)]))
        n = int(np.prod(shape))
        letters = st.integers(0, 1) if dtype == "bool" else st.integers(0, 255)
        content = bytes(draw(st.lists(letters, min_size=n * item, max_size=n * item)))
        other = bytearray(content)
        for place in draw(st.sets(st.integers(0, n - 1))) if n else ():
            other[place * item] ^= 1
        if draw(st.booleans()):  # all changed, to whatever bits: NaNs with payloads, infinities, subnormals
            other = bytearray(draw(st.lists(letters, min_size=n * item, max_size=n * item)))
        before[name], after[name] = tensor_of(dtype, content, shape), tensor_of(dtype, bytes(other), shape)
    return before, after


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs())
def test_applied_to_its_base_a_delta_gives_the_new_weights_bit_for_bit(tmp_path: Path, pair):
    before, after = pair
    kept = {name: tensor.clone() for name, tensor in before.items()}
    delta = made(tmp_path, before, after)
    once = apply(delta, before)
    assert_same_bits(once, after)
    assert_same_bits(apply(delta, once), after)
    assert_same_bits(before, kept)
    again = {name: tensor.clone() for name, tensor in once.items()}
    reading.overlay(again, [delta, delta])
    assert_same_bits(again, after)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 700),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.004, 0.03, 0.5, 1.0]),
    block=st.sampled_from([1, 7, 64, 300]),
)
def test_blocks_of_any_size_and_gaps_of_any_width_fit_together(
    tmp_path: Path, n: int, seed: int, share: float, block: int
):
    rng = np.random.default_rng(seed)
    before = {"w": rng.integers(0, 2**32, n, np.uint32)}
    after = {"w": np.where(rng.random(n) < share, rng.integers(0, 2**32, n, np.uint32), before["w"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_BLOCK", block)
        assert_same_bits(apply(made(tmp_path, before, after), before), after)


def test_gaps_wider_than_a_byte_and_than_two_keep_their_places(tmp_path: Path):
    before = {"w": np.zeros(70_000, np.int8)}
    after = {"w": before["w"].copy()}
    after["w"][[0, 1, 257, 66_000, 69_999]] = [1, 2, 3, 4, 5]
    delta = made(tmp_path, before, after)
    assert [block.planes for block in delta.head.tensors["w"].blocks] == [3]
    assert_same_bits(apply(delta, before), after)


def test_numpy_arrays_and_torch_tensors_give_the_same_file(tmp_path: Path):
    of_numpy = made(tmp_path, BASE, NEW).path.read_bytes()
    before, after = (
        {name: torch.from_numpy(array.copy()) for name, array in each.items()} for each in (BASE, NEW)
    )
    assert made(tmp_path, before, after).path.read_bytes() == of_numpy


def test_the_head_says_what_changed_on_what(tmp_path: Path):
    head = made(tmp_path, BASE, NEW).head
    assert (head.epoch, head.version, head.base_epoch, head.base_version) == (3, 7, 3, 6)
    assert (head.base_digest, head.digest) == (digest(BASE), digest(NEW))
    assert {name: changes.n_changed for name, changes in head.tensors.items()} == {
        "w": 3, "n": 1, "empty": 0, "still": 0,
    }  # fmt: skip
    assert head.n_changed == 4 and head.full_bytes == 48 + 8 + 0 + 40
    assert head.tensors["w"].shape == [3, 4] and head.tensors["w"].dtype == "F32"


def test_what_did_not_change_costs_no_bytes_and_is_shared(tmp_path: Path):
    before = {"big": torch.randn(100_000), "w": torch.zeros(4)}
    after = {"big": before["big"].clone(), "w": torch.ones(4)}
    delta = made(tmp_path, before, after)
    assert delta.nbytes < 1000
    new = apply(delta, before)
    assert new["big"].data_ptr() == before["big"].data_ptr() and new["w"].data_ptr() != before["w"].data_ptr()


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path):
    one, two = torch.arange(8.0), torch.arange(8.0)
    two[3] = -1
    delta = made(
        tmp_path,
        {"wte": one, "norm": one[:2] + 1, "head": one},
        {"wte": two, "norm": one[:2] + 1, "head": two},
    )
    assert delta.head.tied == {"head": "wte"} and set(delta.head.tensors) == {"wte", "norm"}
    new = apply(delta, {"wte": one, "norm": one[:2] + 1, "head": one.clone()})
    assert new["head"] is new["wte"] and new["wte"].tolist() == two.tolist()


def test_weights_of_another_memory_layout_are_no_obstacle(tmp_path: Path):
    before = {"x": np.asfortranarray(np.arange(12.0).reshape(3, 4)), "y": np.arange(3, dtype=">f4")}
    after = {"x": np.arange(12.0).reshape(3, 4) * 2, "y": np.arange(3, dtype=np.float32) + 1}
    assert_same_bits(apply(made(tmp_path, before, after), before), after)
    torch_before = {"x": torch.arange(12.0).reshape(4, 3).T}
    torch_after = {"x": torch.arange(12.0).reshape(4, 3).T + 1}
    assert_same_bits(apply(made(tmp_path, torch_before, torch_after), torch_before), torch_after)


# ---------------------------------------------------------------- refusals
def test_a_wrong_base_is_refused_with_both_digests(tmp_path: Path):
    delta = made(tmp_path, BASE, NEW)
    other = BASE | {"still": np.zeros(5)}
    with pytest.raises(
        WrongBase, match=f"on version 6 of digest {digest(BASE)}.*have digest {digest(other)}"
    ):
        apply(delta, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": np.ones(1)}, "more appeared"),
        ({"w": np.zeros((4, 3), np.float32)}, r"w was F32 \[3, 4\], is F32 \[4, 3\]"),
        ({"w": np.zeros((3, 4), np.float16)}, r"w was F32 \[3, 4\], is F16 \[3, 4\]"),
    ],
)
def test_another_set_of_tensors_wants_a_full_version(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(FullIsDue, match=message):
        made(tmp_path, BASE, BASE | change)


def test_a_tensor_that_vanished_or_is_no_longer_tied_wants_a_full_version(tmp_path: Path):
    with pytest.raises(FullIsDue, match="n, still vanished"):
        made(tmp_path, BASE, {name: BASE[name] for name in ("w", "empty")})
    one = torch.ones(3)
    with pytest.raises(FullIsDue, match="share their memory"):
        made(tmp_path, {"a": one, "b": one}, {"a": one * 2, "b": one * 2})


def test_weights_that_were_overwritten_in_place_want_a_full_version(tmp_path: Path):
    weights = np.zeros(4)
    before = state_of({"w": weights})
    weights += 1
    with pytest.raises(FullIsDue, match="w was overwritten in place"), open(tmp_path / "x", "wb") as file:
        write_delta(file, before, state_of({"w": weights}), epoch=0, version=1, base_version=0)


def test_more_changes_than_the_policy_allows_want_a_full_version(tmp_path: Path):
    before = {"w": np.zeros(1000, np.float32), "v": np.zeros(1000, np.float32)}
    after = {"w": before["w"].copy(), "v": before["v"].copy()}
    after["w"][:500] = np.random.default_rng(0).random(500)
    assert made(tmp_path, before, after, DeltaPolicy(most_changed=0.25)).head.n_changed == 500
    after["v"][0] = 1
    with pytest.raises(FullIsDue, match=r"more than 25% of the elements changed \(at least 501 of 2,000\)"):
        made(tmp_path, before, after, DeltaPolicy(most_changed=0.25))
    with pytest.raises(FullIsDue, match="takes more than 1% of the bytes"):
        made(tmp_path, before, after, DeltaPolicy(most_changed=1.0, most_bytes=0.01))


def test_where_nearly_everything_changed_nothing_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "_encode", lambda *_: pytest.fail("encoded"))
    before = {"w": torch.zeros(1 << 17)}
    with pytest.raises(FullIsDue, match="100% of the first elements"):
        made(tmp_path, before, {"w": before["w"] + 1}, DeltaPolicy())


# ---------------------------------------------------------------- damage
def test_every_damaged_byte_and_every_truncation_is_refused(tmp_path: Path):
    whole = made(tmp_path, BASE, NEW).path.read_bytes()
    path = tmp_path / "bad.delta"

    def refused(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"bad\.delta: ") as caught:
            apply(open_delta(path), BASE, held=digest(BASE))
        path.unlink()  # it is mapped: a new file, not the same one shorter
        return str(caught.value)

    for place in range(len(whole)):
        refused(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
    for length in range(len(whole)):
        assert "truncated" in refused(whole[:length])
    assert "1 bytes follow its end" in refused(whole + b"\0")
    assert "is no delta that this version reads" in refused(b"x" * 100)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path):
    with pytest.raises(WeightsError, match=r"gone\.delta: cannot be read \(No such file"):
        open_delta(tmp_path / "gone.delta")


def test_the_file_may_be_removed_while_it_is_read(tmp_path: Path):
    delta = made(tmp_path, BASE, NEW)
    delta.path.unlink()
    assert_same_bits(apply(delta, BASE), NEW)


CRASH = """
import sys, time, pathlib, numpy as np
from engine.weights import delta_writer, durable
from engine.weights.store import WeightStore, DeltaPolicy
folder, where = pathlib.Path(sys.argv[1]), sys.argv[2]
store = WeightStore(folder / "weights", keep=3, deltas=DeltaPolicy())
weights = np.zeros(1000)
store.publish({"w": weights.copy()}, epoch=1, version=1, step=1)
weights[3] = 1
def stand_still(*_):
    (folder / "here").touch()
    time.sleep(60)
if where == "half written":
    delta_writer._seal = stand_still
else:
    durable.os.replace = stand_still
store.publish({"w": weights}, epoch=1, version=2, step=2)
"""


@pytest.mark.parametrize("where", ["half written", "not yet renamed"])
def test_a_kill_while_a_delta_is_written_leaves_nothing_that_counts(tmp_path: Path, where: str):
    from engine.weights.store import WeightStore

    root = Path(reading.__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", CRASH, str(tmp_path), where], cwd=root)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "here").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait(10)
    store = WeightStore(tmp_path / "weights", keep=3, deltas=DeltaPolicy())
    assert store.versions() == [(1, 1)]
    assert [path.name for path in store.folder.glob(".*")] == [".e1-v2.delta.tmp"]
    event = store.publish({"w": np.full(1000, 2.0)}, epoch=5, version=2, step=2)  # the next incarnation
    store.prune()
    assert event.kind == "full" and sorted(path.name for path in store.folder.iterdir()) == [
        "e1-v1.safetensors", "e5-v2.safetensors",
    ]  # fmt: skip
