"""How a model is cut over the ranks of the megatron trainer. No torch here: settings are checked early."""

from __future__ import annotations

from typing import Literal

import msgspec

from streams.errors import ConfigError


class MegatronSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names as in Megatron-LM, and as in the configuration's section `trainer.megatron`.

    Raises ConfigError for what cannot be done with any model or number of ranks.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # None: tensor_model_parallel_size
    sequence_parallel: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None  # with "full" alone
    recompute_num_layers: int | None = None  # with "full" alone
    transformer_impl: Literal["local", "transformer_engine"] = "local"

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "trainer.megatron.sequence_parallel = true splits sequences over the tensor-parallel ranks, and "
                "tensor_model_parallel_size is 1: set it to 2 or more, or sequence_parallel = false"
            )
        is_full = self.recompute_granularity == "full"
        if is_full != (self.recompute_method is not None) or is_full != (
            self.recompute_num_layers is not None
        ):
            raise ConfigError(
                "trainer.megatron: recompute_method and recompute_num_layers go with recompute_granularity = "
                '"full", which needs both of them'
            )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold the model once."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Raises ConfigError for a number of ranks that cannot be cut like this."""
        whole = self.model_parallel_size
        if world_size % whole:
            raise ConfigError(
                f"trainer.n_ranks = {world_size}: trainer.megatron needs a multiple of "
                f"tensor_model_parallel_size × pipeline_model_parallel_size = {whole}"
            )
        experts = (
            self.expert_tensor_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        )
        if world_size % experts:
            raise ConfigError(
                f"trainer.n_ranks = {world_size}: trainer.megatron needs a multiple of expert_tensor_parallel_size × "
                f"expert_model_parallel_size × pipeline_model_parallel_size = {experts}"
            )
        return world_size // whole
