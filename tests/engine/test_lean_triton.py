"""Triton's kernels for log-probs, in Triton's interpreter on the CPU: the arithmetic, not the compiler.

The interpreter is chosen when triton is imported, so each case is a process of its own. On a GPU the same comparison is
made by benchmarks/gpu/fsdp2_step.py (part `lean`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import torch
from engine.algorithms import lean_triton
from engine.algorithms.lean import LeanLogprobs
torch.manual_seed(1)
for width, temperature, dtype, block, stride in json.loads(sys.argv[1]):
    lean_triton._BLOCK = block
    wide = (torch.randn(6, width * stride) * 5).to(getattr(torch, dtype))
    wide[1, 3::4] = -torch.inf  # forbidden tokens
    wide[2] = 0
    wide[3, 2] = 60  # all but certain
    targets, weights = torch.tensor([0, 2, width - 1, 2, 5, width // 2]), torch.randn(6)
    found = []
    for function in (lean_triton.TritonLogprobs, LeanLogprobs):
        own = wide.clone().requires_grad_()
        logprobs, entropy = function.apply(own[:, ::stride], targets, temperature)
        assert not entropy.requires_grad
        (logprobs * weights).sum().backward()
        found.append((logprobs.detach(), entropy, own.grad.float()))
    largest = [float((one - other).abs().max()) for one, other in zip(*found)]
    apart = (found[0][2] - found[1][2]).abs() / found[1][2].abs().clamp(min=1e-3)
    print(json.dumps([*largest[:2], float(apart.max())]))
"""
CASES = {
    "several blocks and a tail": (41, 1.0, "bfloat16", 16, 1),
    "one block": (41, 0.7, "bfloat16", 64, 1),
    "half precision": (64, 1.3, "float16", 16, 1),
    "columns that are not side by side": (40, 1.0, "bfloat16", 16, 2),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    """One process for all, since it loads torch and triton."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(list(CASES.values()))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_the_log_probs_entropies_and_gradients_of_the_plain_formula(
    found: dict[str, Any], case: str
) -> None:
    logprobs, entropy, gradient = found[case]
    assert logprobs <= 1e-5
    assert entropy <= 2e-5
    assert gradient <= 2**-7  # relative; the two round to neighbours in half precision
