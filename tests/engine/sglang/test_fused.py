"""What a server must show of a published file: as SGLang lays dense models out, pads and rounds them."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.rollout.sglang.api import ServerInfo
from engine.rollout.sglang.fused import Proof, expected_hashes
from engine.weights import tensors as files

LAYER = "model.layers.0"


def shown(data: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]


def raw(**tensors: Any) -> dict[str, files.RawTensor]:
    return {name.replace("__", "."): files.raw(tensor) for name, tensor in tensors.items()}


def matrix(rows: int, seed: int, columns: int = 4) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def server(**raw_info: Any) -> ServerInfo:
    info = {"device": "cpu", "dtype": "float32", "quantization": None, **raw_info}
    return ServerInfo((0, 5, 23), info, raw_info.get("tp_size", 1), 1, "/model", None, 512)


def test_query_key_and_value_are_one_parameter_and_so_are_gate_and_up() -> None:
    q, k, v, gate, up, norm = (matrix(rows, seed) for seed, rows in enumerate((8, 4, 4, 6, 6, 1)))
    bias = np.arange(3, dtype=np.float32)
    given = {
        f"{LAYER}.self_attn.k_proj.weight": k,
        f"{LAYER}.self_attn.q_proj.weight": q,
        f"{LAYER}.self_attn.v_proj.weight": v,
        **{f"{LAYER}.self_attn.{each}_proj.bias": bias * n for n, each in enumerate("qkv")},
        f"{LAYER}.mlp.up_proj.weight": up,
        f"{LAYER}.mlp.gate_proj.weight": gate,
        f"{LAYER}.input_layernorm.weight": norm,
    }
    assert expected_hashes({name: files.raw(each) for name, each in given.items()}, "F32") == {
        f"{LAYER}.self_attn.qkv_proj.weight": shown(np.concatenate([q, k, v])),
        f"{LAYER}.self_attn.qkv_proj.bias": shown(np.concatenate([bias * 0, bias, bias * 2])),
        f"{LAYER}.mlp.gate_up_proj.weight": shown(np.concatenate([gate, up])),
        f"{LAYER}.input_layernorm.weight": shown(norm),
    }


def test_a_vocabulary_is_padded_with_rows_of_zeros_to_a_multiple_of_64() -> None:
    whole, odd = matrix(64, 1), matrix(70, 2)
    padded = np.concatenate([odd, np.zeros((58, 4), np.float32)])
    assert expected_hashes(
        {"model.embed_tokens.weight": files.raw(whole), "lm_head.weight": files.raw(odd)}, "F32"
    ) == {"model.embed_tokens.weight": shown(whole), "lm_head.weight": shown(padded)}


def test_values_are_rounded_as_a_copy_into_the_servers_type_rounds_them() -> None:
    torch = pytest.importorskip("torch")
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(4096).astype(np.float32)) * 8
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.0517578125e-05, 0.0, -0.0])
    values = torch.cat([values, ties])
    for ours, given in types.items():
        for theirs, type_of_server in types.items():
            tensor = values.to(given)
            if {ours, theirs} == {"F16", "BF16"}:
                continue  # no server is given these
            held = tensor.to(type_of_server).view(torch.uint8).numpy()
            assert expected_hashes({"norm": files.raw(tensor)}, theirs) == {"norm": shown(held)}, (
                ours,
                theirs,
            )


def test_the_first_load_says_what_can_be_compared_and_that_must_agree_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    proof = Proof(server())
    first = raw(model__norm__weight=matrix(1, 1), packed=matrix(8, 2))
    norm = expected_hashes(first, "F32")["model.norm.weight"]
    with caplog.at_level(logging.WARNING):
        verdict = proof.compare(proof.expected(first), {"model.norm.weight": norm, "packed": "0" * 16})
    assert verdict == ([], False)
    assert "1 of the server's 2 parameters are not laid out as published (packed)" in caplog.text
    second = raw(model__norm__weight=matrix(1, 3), packed=matrix(8, 4))
    verdict = proof.compare(proof.expected(second), {"model.norm.weight": norm, "packed": "1" * 16})
    assert verdict == (["model.norm.weight"], False)


def test_when_every_parameter_is_compared_nothing_else_has_to_be() -> None:
    proof, tensors = Proof(server()), raw(model__norm__weight=matrix(1, 1), lm_head__weight=matrix(64, 2))
    expected = proof.expected(tensors)
    assert proof.compare(expected, expected) == ([], True)
    tied = {"model.norm.weight": expected["model.norm.weight"]}  # such a server has no lm_head of its own
    assert Proof(server()).compare(expected, tied) == ([], True)


@pytest.mark.parametrize("info", [{"device": "cuda"}, {"tp_size": 2}, {"quantization": "fp8"}])
def test_nothing_is_read_for_a_server_whose_hashes_cannot_be_worked_out(info: dict[str, Any]) -> None:
    proof = Proof(server(**info))
    assert not proof.is_possible and proof.expected(raw(norm=matrix(1, 1))) == {}
    assert proof.compare({}, {"norm": "0" * 16}) == ([], False)


def test_a_file_is_hashed_as_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        files.write_file(out, raw(model__norm__weight=matrix(3, 1)), {})
    assert expected_hashes(files.read_raw(file), "") == {"model.norm.weight": shown(matrix(3, 1))}
