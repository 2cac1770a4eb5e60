"""Two modules that stand in where megatron-core without Transformer Engine is slow, or cannot be used.

Its own RMSNorm refuses sequence parallelism, and its own attention writes all T · T scores to memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """As Hugging Face computes it: in float32, rounded, then times the weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of what saw only this rank's part of the sequence
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SdpaAttention(MegatronModule):
    """torch's scaled_dot_product_attention, causal: memory grows with T. Rows are padded on the right, so no mask."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> Tensor:
        """[T, B, heads, head_dim], keys and values [T, B, groups, head_dim] → [T, B, heads · head_dim].

        Packed: without B, and each row of the T tokens sees itself alone.
        """
        if packed_seq_params is None:
            return self._rows(query, key, value)
        lengths = packed_seq_params.lengths
        rows = zip(*(each.unsqueeze(1).split(lengths) for each in (query, key, value)), strict=True)
        return torch.cat([self._rows(*row) for row in rows]).squeeze(1)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Packed(PackedSeqParams):
    """Rows one after another in one forward, as Megatron describes them; `lengths` are on the host."""

    lengths: list[int]

    @classmethod
    def of(cls, bounds: list[int], device: torch.device) -> Packed:
        """Row r is the tokens bounds[r] … bounds[r + 1]. Starts on `device` "cpu" spare each layer a wait for them."""
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        lengths = [end - begin for begin, end in pairwise(bounds)]
        longest = max(lengths)
        made = cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        made.lengths = lengths
        return made
