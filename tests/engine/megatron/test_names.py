"""Hugging Face tensors and Megatron's parts of them: there and back bit for bit, however many ranks there are."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.trainer.megatron.names import (  # noqa: E402
    Weight,
    blocks,
    cut,
    hf_shapes,
    weight_of,
    whole,
)
from engine.trainer.megatron.shape import Experts, Shape  # noqa: E402

SHAPE = Shape(
    model_type="qwen3_moe",
    vocab_size=13,
    hidden_size=6,
    n_layers=4,
    n_heads=8,
    n_groups=4,
    head_dim=2,
    ffn_size=8,
    norm_eps=1e-6,
    is_tied=False,
    qkv_bias=True,
    qk_norm=True,
    rope_theta=1e4,
    rope_factor=None,
    max_length=32,
    experts=Experts(4, 2, 4, True, (True,) * 4),
)
NAMES = [
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
    "decoder.layers.1.input_layernorm.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.self_attention.linear_qkv.bias",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.1.self_attention.q_layernorm.weight",
    "decoder.layers.1.self_attention.k_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc2.weight",
    "decoder.layers.1.mlp.router.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight",
]


def tensors_of(weight: Weight) -> list[Any]:
    """Every element is another number."""
    made, at = [], 0
    for shape in hf_shapes(weight, SHAPE):
        count = math.prod(shape)
        made.append(torch.arange(at, at + count, dtype=torch.float32).reshape(shape) + 1)
        at += count
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_cut_over_ranks_is_put_together_bit_for_bit(name: str, size: int) -> None:
    weight = weight_of(name)
    tensors = tensors_of(weight)
    parts = [cut(weight, tensors, rank, size, SHAPE) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    back = whole(weight, parts, SHAPE)
    assert [torch.equal(a, b) for a, b in zip(back, tensors, strict=True)] == [True] * len(tensors)


def test_a_ranks_queries_keys_and_values_are_those_of_whole_groups() -> None:
    weight = weight_of("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = tensors_of(weight)  # [16, 6], [8, 6], [8, 6]: heads of 2 rows, two to a group
    second = cut(weight, [q, k, v], 1, 2, SHAPE)
    want = [q[8:12], k[4:6], v[4:6], q[12:16], k[6:8], v[6:8]]
    assert torch.equal(second, torch.cat(want))


def test_a_ranks_gate_lies_above_its_own_part_of_up() -> None:
    weight = weight_of("decoder.layers.0.mlp.linear_fc1.weight")
    gate, up = tensors_of(weight)
    assert torch.equal(cut(weight, [gate, up], 1, 4, SHAPE), torch.cat([gate[2:4], up[2:4]]))


def test_rows_that_stand_for_no_token_are_zero_and_never_come_back() -> None:
    weight = weight_of("embedding.word_embeddings.weight")
    (embedding,) = tensors_of(weight)
    parts = [cut(weight, [embedding], rank, 4, SHAPE) for rank in range(4)]
    assert [len(part) for part in parts] == [4] * 4 and not parts[3][1:].any() and bool(parts[3][0].all())
    assert torch.equal(whole(weight, parts, SHAPE)[0], embedding)


def test_layers_and_experts_are_numbered_in_the_whole_model() -> None:
    weight = weight_of("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight", 2, 2)
    assert weight.hf == ("model.layers.3.mlp.experts.3.down_proj.weight",) and weight.is_expert
    assert weight_of("decoder.layers.0.input_layernorm.weight", 3).hf == (
        "model.layers.3.input_layernorm.weight",
    )


def test_transformer_engines_fused_norms_are_the_same_weights() -> None:
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        assert weight_of(f"decoder.layers.2.{fused}") == weight_of(f"decoder.layers.2.{plain}")


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.linear_fc1.bias", "decoder.layers.0.cross.weight", "mtp.x", "decoder.x"]
)
def test_a_parameter_without_a_hugging_face_name_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        weight_of(name)


@given(st.sampled_from(NAMES), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=60)
def test_the_blocks_of_all_ranks_cover_each_whole_tensor_once(name: str, size: int) -> None:
    """What checkpoints name is the same for every number of ranks."""
    weight = weight_of(name)
    tensors = tensors_of(weight)
    room: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for rank in range(size):
        part = cut(weight, tensors, rank, size, SHAPE)
        for block in blocks(weight, part.shape, rank, size, SHAPE):
            into = room.setdefault(block.name, torch.zeros(block.shape))
            count = counts.setdefault(block.name, torch.zeros(block.shape))
            values = part[block.first_row : block.end_row]
            where = tuple(slice(at, at + n) for at, n in zip(block.offset, values.shape, strict=True))
            into[where] = values
            count[where] += 1
    each = 1 if weight.axis is not None else size
    assert all(bool((count == each).all()) for count in counts.values())
    alone = cut(weight, tensors, 0, 1, SHAPE)
    for block in blocks(weight, alone.shape, 0, 1, SHAPE):
        assert torch.equal(room[block.name], alone[block.first_row : block.end_row])
