"""Deltas that are found where the weights lie: the same bytes as those found in main memory, whatever lies where."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from engine.weights import delta_device  # noqa: E402
from engine.weights import delta_writer as writing  # noqa: E402
from engine.weights.bucketing import side_by_side  # noqa: E402
from engine.weights.delta_writer import DeltaPolicy, FullIsDue, state_of, write_delta  # noqa: E402

INTEGERS = {"F64": torch.int64, "F32": torch.int32, "BF16": torch.int16, "F8": torch.uint8}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8": torch.float8_e4m3fn,
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_BLOCK", 16)
    monkeypatch.setattr(delta_device, "PASS", 40)


def written(
    old: dict[str, Any], new: dict[str, Any], *, on_device: bool, policy: DeltaPolicy | None = None
) -> bytes:
    states = [state_of(tensors) for tensors in (old, new)]
    if on_device:
        states = [
            state._replace(on_device=tensors) for state, tensors in zip(states, (old, new), strict=True)
        ]
        for state in states:  # nothing of them may be looked at but for their first elements
            assert state.on_device is not None
    file = io.BytesIO()
    write_delta(file, states[0], states[1], epoch=1, version=2, base_version=1, policy=policy)
    return file.getvalue()


def random_pair(rng: np.random.Generator, layout: list[tuple[str, int]], share: float) -> tuple[Any, Any]:
    old, new = {}, {}
    for place, (dtype, length) in enumerate(layout):
        bits = torch.from_numpy(rng.integers(0, 200, length)).to(INTEGERS[dtype])
        moved = bits.clone()
        moved[torch.from_numpy(rng.random(length) < share)] += 1
        old[f"t{place}"], new[f"t{place}"] = bits.view(DTYPES[dtype]), moved.view(DTYPES[dtype])
    return old, new


LAYOUTS = st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 90)), min_size=1, max_size=8)


@pytest.mark.usefixtures("small_blocks")
@given(LAYOUTS, st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.booleans(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=150)
def test_what_is_found_on_a_device_gives_the_very_file_of_main_memory(
    layout: list[tuple[str, int]], share: float, lies_side_by_side: bool, seed: int
) -> None:
    old, new = random_pair(np.random.default_rng(seed), layout, share)
    if lies_side_by_side:
        old, new = side_by_side(old), side_by_side(new)
    assert written(old, new, on_device=True) == written(old, new, on_device=False)


def test_gaps_of_every_width_and_a_block_that_begins_after_a_long_stretch_without_a_change() -> None:
    old = side_by_side({"a": torch.zeros(9_000_000).bfloat16(), "b": torch.zeros(70_000).bfloat16()})
    new = side_by_side({name: tensor.clone() for name, tensor in old.items()})
    for name, places in (("a", [0, 255, 512, 66_049, 4_194_303, 8_999_999]), ("b", [69_999])):
        new[name][places] = 1.0
    assert written(old, new, on_device=True) == written(old, new, on_device=False)


@pytest.mark.usefixtures("small_blocks")
def test_neighbours_in_both_memories_are_searched_as_one_piece() -> None:
    old, new = random_pair(
        np.random.default_rng(0), [("BF16", 30), ("BF16", 50), ("F32", 9), ("F32", 20)], 0.5
    )
    alone = list(delta_device._pieces(old, new, list(old), 16))
    together = list(delta_device._pieces(side_by_side(old), side_by_side(new), list(old), 16))
    assert [len(piece.new) for piece in alone] == [30, 50, 9, 20]
    assert [len(piece.new) for piece in together] == [80, 29]
    assert [(each.name, each.start, each.at) for each in together[0].blocks] == [
        ("t0", 0, 0), ("t0", 16, 16), ("t1", 0, 30), ("t1", 16, 46), ("t1", 32, 62), ("t1", 48, 78),
    ]  # fmt: skip
    assert [[each.at for each in blocks] for blocks in delta_device._passes(together[0].blocks)] == [
        [0, 16], [30, 46], [62, 78],
    ]  # fmt: skip


def test_tied_tensors_are_found_once_and_too_many_changes_still_want_a_full_version() -> None:
    before, after = torch.zeros(100_000).bfloat16(), torch.zeros(100_000).bfloat16()
    after[::3] = 1.0
    old, new = ({"w": each, "tied": each} for each in (before, after))
    assert written(old, new, on_device=True) == written(old, new, on_device=False)
    with pytest.raises(FullIsDue, match="more than 25% of the elements changed"):
        written(old, new, on_device=True, policy=DeltaPolicy())
