"""Where two arrays differ, by words of torch and by Triton's kernels: what numpy finds, wherever they begin and end.

The kernels are compiled here for a GPU that is not here, and run in Triton's interpreter, in a process of its own: this
file, as a program. On a GPU: benchmarks/gpu/weights_ipc.py.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from engine.weights import delta_words  # noqa: E402
from engine.weights import delta_writer as writing  # noqa: E402
from engine.weights.bucketing import side_by_side  # noqa: E402
from engine.weights.delta_words import Kernels  # noqa: E402
from engine.weights.delta_writer import state_of, write_delta  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(rng: np.random.Generator, n: int, item: int, share: float) -> tuple[Any, Any]:
    """Items of random bits, negative ones among them; those that change do so in one bit."""
    old = torch.from_numpy(rng.integers(0, 256, n * item, np.uint8)).view(ITEMS[item])
    bits = np.frombuffer(np.uint64(1) << rng.integers(0, 8 * item, n, np.uint64), np.uint64)
    flips = np.where(rng.random(n) < share, bits, 0).astype(f"<u{item}")
    return old, old ^ torch.from_numpy(flips.view(np.uint8).copy()).view(ITEMS[item])


def right(old: Any, new: Any) -> tuple[np.ndarray, np.ndarray]:
    places = np.flatnonzero(old.numpy() != new.numpy())
    return places.astype(np.int32), new.numpy()[places]


def is_right(found: tuple[Any, Any], old: Any, new: Any) -> bool:
    return all(
        here.numpy().dtype == there.dtype and np.array_equal(here.numpy(), there)
        for here, there in zip(found, right(old, new), strict=True)
    )


# ---------------------------------------------------------------- torch
@given(
    st.sampled_from(list(ITEMS)), st.integers(1, 70), st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(0, 1 << 30),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_changes_are_those_of_numpy_wherever_both_arrays_begin(
    item: int, n: int, skipped: tuple[int, int], share: float, seed: int
) -> None:
    old, new = words(np.random.default_rng(seed), n, item, share)
    old, new = (
        torch.cat((torch.zeros(skip, dtype=each.dtype), each, each))[skip : skip + n]
        for each, skip in zip((old, new), skipped, strict=True)
    )
    assert is_right(delta_words.changes(old, new), old, new)


def test_arrays_are_compared_by_words_but_for_their_ends_and_one_by_one_where_words_do_not_agree() -> None:
    memory, other = torch.zeros(64, dtype=torch.int16), torch.ones(64, dtype=torch.int16)
    assert memory.data_ptr() % 8 == other.data_ptr() % 8 == 0
    assert delta_words._words(memory, other) == (0, 64)
    assert delta_words._words(memory[3:50], other[3:50]) == (1, 45)
    assert delta_words._words(memory[3:50], other[7:54]) == (1, 45)
    assert delta_words._words(memory[5:7], other[5:7]) == (2, 2)
    assert delta_words._words(memory[5:7], other[4:6]) == (2, 2)
    assert delta_words._words(memory[1:50], other[2:51]) == (49, 49)
    odd = torch.frombuffer(bytearray(130), dtype=torch.uint8)[1:129]
    at_odd_address = torch.from_numpy(odd.numpy())  # its memory begins where no word can
    even = torch.zeros(128, dtype=torch.uint8)
    assert delta_words._words(at_odd_address, even) == (128, 128)
    assert delta_words._words(at_odd_address, at_odd_address) == (128, 128)


def test_words_of_torch_are_compared_where_triton_does_not_run_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(delta_words, "_try", uncompiled)
    for cached in (delta_words.kernels_on, delta_words._say):
        cached.cache_clear()
    with caplog.at_level(logging.WARNING):
        ways = [delta_words.kernels_on(torch.device("cuda", 0), item) for item in ITEMS.values()]
    delta_words.kernels_on.cache_clear()
    assert ways == [delta_words.OF_TORCH] * 4
    ours = [each for each in caplog.records if each.name.startswith("engine.")]
    assert [record.getMessage() for record in ours] == [
        "weights: what changed is found by torch, a few times slower than by Triton's kernels, which do not run on "
        "cuda:0 (RuntimeError: Failed to find C compiler.)"
    ]


def test_a_way_that_finds_other_changes_than_torch_fails_its_trial() -> None:
    changes, planes = delta_words.OF_TORCH

    def one_short(old: Any, new: Any, item: Any) -> tuple[Any, Any]:
        return tuple(each[:-1] for each in changes(old, new, item))  # pyright: ignore[reportReturnType]

    def one_gap_is_wrong(places: Any, values: Any) -> tuple[Any, Any]:
        made, widest = planes(places, values)
        made[-1, 5] += 1
        return made, widest

    for item in ITEMS.values():
        delta_words._try(delta_words.OF_TORCH, torch.device("cpu"), item)
        for wrong in (Kernels(one_short, planes), Kernels(changes, one_gap_is_wrong)):
            with pytest.raises(RuntimeError, match="found other changes"):
                delta_words._try(wrong, torch.device("cpu"), item)


# ---------------------------------------------------------------- Triton
def cases() -> dict[str, tuple[Any, Any]]:
    """Pairs of arrays, shorter and longer than what one program of a kernel does: 1,024 words."""
    made: dict[str, tuple[Any, Any]] = {}
    rng = np.random.default_rng(0)
    for item in ITEMS:
        word = 8 // item
        program = 1024 * word
        for share in (0.0, 0.03, 0.6):
            made[f"{item} bytes, {share:.0%} changed"] = words(rng, program + 300 * word, item, share)
        made[f"{item} bytes, all changed"] = words(rng, 300 * word, item, 1.0)
        for n in (word, program - word, program + word):
            made[f"{item} bytes, {n} items"] = words(rng, n, item, 0.05)
        for name, places in (("ends", [0, -1]), ("last of a program", [program - 1])):
            old, _ = words(rng, program + word, item, 0.0)
            new = old.clone()
            new[places] ^= 1
            made[f"{item} bytes, the {name} alone"] = (old, new)
        old, new = words(rng, program + 70, item, 0.02)
        made[f"{item} bytes, ends that are no words"] = (old[1:-1], new[1:-1])
    return made


def files() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Sets of weights of several dtypes and blocks (of 3,000 elements)."""
    rng, made = np.random.default_rng(1), {}
    dtypes = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    lengths = [(2, 7001), (2, 3), (2, 3000), (1, 3003), (4, 1), (4, 3100), (8, 301), (2, 64)]
    for share in (0.0, 0.01, 0.3):
        old, new = {}, {}
        for place, (item, n) in enumerate(lengths):
            old[f"t{place}"], new[f"t{place}"] = (
                each.view(dtypes[item]) for each in words(rng, n, item, share)
            )
        made[f"alone, {share:.0%}"] = (old, new)
        made[f"side by side, {share:.0%}"] = (side_by_side(old), side_by_side(new))
    return made


def written(old: dict[str, Any], new: dict[str, Any], *, on_device: bool) -> bytes:
    states = [state_of(each)._replace(on_device=each if on_device else None) for each in (old, new)]
    file = io.BytesIO()
    write_delta(file, states[0], states[1], epoch=1, version=2, base_version=1)
    return file.getvalue()


def main() -> None:
    from engine.weights import delta_triton

    calls: list[int] = []

    def changes(old: Any, new: Any, item: Any) -> tuple[Any, Any]:
        calls.append(len(old))
        return delta_triton.changes(old, new, item)

    kernels = Kernels(changes, delta_triton.planes)
    delta_words.kernels_on = lambda device, item: kernels  # pyright: ignore[reportAttributeAccessIssue]
    found: dict[str, bool] = {}
    delta_words._try(kernels, torch.device("cpu"), torch.int16)
    for name, (old, new) in cases().items():
        calls.clear()
        changed = delta_words.changes(old, new)
        found[name] = is_right(changed, old, new) and len(calls) == 1
        if len(changed[0]):
            right = delta_words.OF_TORCH.planes(*changed)
            found[name] &= all(map(torch.equal, delta_words.planes(*changed), right))
    writing._BLOCK = 3000
    for name, (old, new) in files().items():
        calls.clear()
        is_equal = written(old, new, on_device=True) == written(old, new, on_device=False)
        found[f"file: {name}"] = is_equal and bool(calls) != name.endswith(" 0%")
    print(json.dumps(found))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.timeout(300)  # the interpreter takes its time on a busy machine
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_triton_finds_the_changes_of_numpy(item: int, interpreted: dict[str, bool]) -> None:
    found = {name: is_equal for name, is_equal in interpreted.items() if name.startswith(f"{item} bytes")}
    assert len(found) == 10
    assert all(found.values()), [name for name, is_equal in found.items() if not is_equal]


@pytest.mark.timeout(300)
def test_triton_gives_the_very_files_of_main_memory(interpreted: dict[str, bool]) -> None:
    found = {name: is_equal for name, is_equal in interpreted.items() if name.startswith("file")}
    assert len(found) == 6
    assert all(found.values()), [name for name, is_equal in found.items() if not is_equal]


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(item: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.weights import delta_triton

    arrays = {"old": "*i64", "new": "*i64", "masks": "*u8", "planes": "*u8"}
    arrays |= {"counts": "*i32", "ends": "*i32", "places": "*i32", "widest": "*i32"}
    arrays["values"] = "*u8" if item == 1 else f"*i{8 * item}"
    for kernel, options in (
        (delta_triton.compare, {**delta_triton._COMPARE, "BITS": 8 * item}),
        (delta_triton.collect, {**delta_triton._COLLECT, "BITS": 8 * item}),
        (delta_triton.split, {**delta_triton._SPLIT, "ITEM": item}),
    ):
        fixed = {name: options.pop(name) for name in kernel.arg_names if name in options}
        types = {name: "constexpr" if name in fixed else arrays.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(
            ASTSource(kernel, types, constexprs=fixed), target=GPUTarget("cuda", 90, 32), options=options
        )
        assert len(made.asm["cubin"]) > 1000


if __name__ == "__main__":
    main()
