"""Megatron's parameters and Hugging Face's tensors: which is which, and how each is cut over tensor-parallel ranks.

    q_proj, k_proj, v_proj   ◄─►  linear_qkv     for each group: its queries, then its key, then its value
    gate_proj, up_proj       ◄─►  linear_fc1     gate above up, on each rank its rows of both
    embed_tokens, lm_head    ◄─►  word_embeddings, output_layer: rows are padded until every rank has as many
    the others               ◄─►  as they are

Pure functions over tensors; no Megatron here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.trainer.megatron.shape import Shape

Kind = Literal["plain", "qkv", "gate_up", "vocab"]


class Weight(NamedTuple):
    """One whole parameter, wherever its parts lie."""

    name: str  # Megatron's, with the number of the layer and expert in the whole model
    hf: tuple[str, ...]
    kind: Kind
    axis: Literal[0, 1] | None  # that tensor parallelism cuts; None: every rank has all of it
    is_expert: bool = False


class Block(NamedTuple):
    """Rows of a local parameter that are a rectangle of one whole tensor: how checkpoints name them."""

    name: str
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]  # of the rectangle in it
    first_row: int  # in the local parameter
    end_row: int


_OUTSIDE: dict[str, Weight] = {
    "embedding.word_embeddings.weight": Weight("embedding", ("model.embed_tokens.weight",), "vocab", 0),
    "output_layer.weight": Weight("output_layer", ("lm_head.weight",), "vocab", 0),
    "decoder.final_layernorm.weight": Weight("final_layernorm", ("model.norm.weight",), "plain", None),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_IN_LAYER: dict[str, tuple[tuple[str, ...], Kind, Literal[0, 1] | None]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "plain", None),
    "self_attention.linear_qkv.weight": (tuple(f"{name}.weight" for name in _QKV), "qkv", 0),
    "self_attention.linear_qkv.bias": (tuple(f"{name}.bias" for name in _QKV), "qkv", 0),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "plain", 1),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "plain", None),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "plain", None),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "plain", None),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up", 0),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "plain", 1),
    "mlp.router.weight": (("mlp.gate.weight",), "plain", None),
}
_IN_EXPERT: dict[str, tuple[tuple[str, ...], Kind, Literal[0, 1] | None]] = {
    "linear_fc1.weight": (("gate_proj.weight", "up_proj.weight"), "gate_up", 0),
    "linear_fc2.weight": (("down_proj.weight",), "plain", 1),
}
# Transformer Engine's layers hold the norm before them
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def weight_of(name: str, first_layer: int = 0, first_expert: int = 0) -> Weight:
    """Of a parameter's name on a rank whose layers and experts begin with these. Raises KeyError for an unknown one."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    found = _LAYER.fullmatch(name)
    if found is None:
        raise KeyError(name)
    layer, inside = int(found[1]) + first_layer, _FUSED_NORMS.get(found[2], found[2])
    expert = _EXPERT.fullmatch(inside)
    if expert is None:
        hf, kind, axis = _IN_LAYER[inside]
        return Weight(f"layers.{layer}.{inside}", _under(f"model.layers.{layer}", hf), kind, axis)
    number, part = int(expert[1]) + first_expert, expert[2]
    hf, kind, axis = _IN_EXPERT[part]
    where = f"model.layers.{layer}.mlp.experts.{number}"
    return Weight(f"layers.{layer}.mlp.experts.{number}.{part}", _under(where, hf), kind, axis, True)


def _under(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def hf_shapes(weight: Weight, shape: Shape) -> list[tuple[int, ...]]:
    """Shapes of a weight's Hugging Face tensors, in the order of `weight.hf`."""
    hidden = (shape.hidden_size,)
    if weight.kind == "vocab":
        return [(shape.vocab_size, *hidden)]
    if weight.kind == "qkv":
        rows = [heads * shape.head_dim for heads in (shape.n_heads, shape.n_groups, shape.n_groups)]
        return [(count, *hidden) if weight.name.endswith("weight") else (count,) for count in rows]
    ffn = shape.experts.ffn_size if weight.is_expert and shape.experts else shape.ffn_size
    if weight.kind == "gate_up":
        return [(ffn, *hidden)] * 2
    if weight.name.endswith("linear_proj.weight"):
        return [(*hidden, shape.n_heads * shape.head_dim)]
    if weight.name.endswith("linear_fc2.weight"):
        return [(*hidden, ffn)]
    if weight.name.endswith("router.weight") and shape.experts:
        return [(shape.experts.count, *hidden)]
    return [
        (shape.head_dim,) if weight.name.endswith(("q_layernorm.weight", "k_layernorm.weight")) else hidden
    ]


def cut(weight: Weight, tensors: Sequence[Tensor], rank: int, size: int, shape: Shape) -> Tensor:
    """The part of one tensor-parallel rank, of whole Hugging Face tensors in the order of `weight.hf`."""
    if weight.kind == "qkv":
        return _slice(_grouped(tensors, shape), 0, rank, size).flatten(0, 1)
    if weight.kind == "gate_up":
        return torch.cat([_slice(tensor, 0, rank, size) for tensor in tensors])
    (tensor,) = tensors
    if weight.kind == "vocab":
        per_rank = shape.padded_vocab(size) // size
        part = tensor[rank * per_rank : (rank + 1) * per_rank]
        return torch.cat([part, tensor.new_zeros(per_rank - len(part), *tensor.shape[1:])])
    return tensor if weight.axis is None else _slice(tensor, weight.axis, rank, size)


def whole(weight: Weight, parts: Sequence[Tensor], shape: Shape) -> list[Tensor]:
    """The Hugging Face tensors of the parts of all tensor-parallel ranks; undoes `cut` bit for bit."""
    if weight.axis is None:
        return [parts[0]]
    if weight.kind == "qkv":
        return _ungrouped(torch.cat(list(parts)), shape)
    if weight.kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[which] for half in halves]) for which in (0, 1)]
    joined = torch.cat(list(parts), weight.axis) if len(parts) > 1 else parts[0]
    return [joined[: shape.vocab_size] if weight.kind == "vocab" else joined]


def blocks(weight: Weight, local: torch.Size, rank: int, size: int, shape: Shape) -> list[Block]:
    """Where the rows of a rank's part lie in whole tensors that are the same for every cut. Padding lies nowhere."""
    rows, *columns = local
    axis = weight.axis
    if weight.kind == "vocab":
        first = rank * rows
        real = max(0, min(rows, shape.vocab_size - first))
        return [Block(weight.name, (shape.vocab_size, *columns), (first, 0), 0, real)] if real else []
    if weight.kind == "gate_up":
        half = rows // 2
        return [
            Block(f"{weight.name}/{what}", (half * size, *columns), (rank * half, 0), at, at + half)
            for what, at in (("gate", 0), ("up", half))
        ]
    whole_shape, offset = [rows, *columns], [0] * len(local)
    if axis is not None:
        whole_shape[axis], offset[axis] = local[axis] * size, rank * local[axis]
    return [Block(weight.name, tuple(whole_shape), tuple(offset), 0, rows)]


def _grouped(tensors: Sequence[Tensor], shape: Shape) -> Tensor:
    """Queries, keys, values [heads · head_dim, …] to [groups, (heads / groups + 2) · head_dim, …]."""
    return torch.cat([each.unflatten(0, (shape.n_groups, -1)) for each in tensors], dim=1)


def _ungrouped(rows: Tensor, shape: Shape) -> list[Tensor]:
    per_group = shape.n_heads // shape.n_groups
    sizes = [per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    grouped = rows.unflatten(0, (shape.n_groups, sum(sizes)))
    return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


def _slice(tensor: Tensor, axis: int, rank: int, size: int) -> Tensor:
    per_rank = tensor.shape[axis] // size
    return tensor.narrow(axis, rank * per_rank, per_rank)
