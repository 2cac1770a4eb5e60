"""This rank's part of a GPTModel, as a Hugging Face configuration describes it, in Megatron's wrappers.

    Groups ─► GPTModel (this pipeline stage's layers) ─► [Float16Module] ─► DistributedDataParallel (fp32 gradients)

Nothing here changes what the model computes: no dropout, no fp8, no fusions. Losses carry the divisors of the whole
minibatch, so gradients are summed over ranks, never averaged.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from engine import devices
from engine.trainer.megatron.modules import RmsNorm, SdpaAttention
from engine.trainer.megatron.names import weight_of
from engine.trainer.megatron.settings import MegatronSettings
from engine.trainer.megatron.shape import Shape
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError


class Place(NamedTuple):
    """(rank, size) of this process in each of Megatron's groups."""

    tensor: tuple[int, int]
    pipeline: tuple[int, int]
    data: tuple[int, int]
    expert: tuple[int, int]
    expert_tensor: tuple[int, int]

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline[0] == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline[0] == self.pipeline[1] - 1


def _are_of_this_group() -> bool:
    """Whether Megatron's groups were made over torch's default group of now, and not over an earlier one."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if not isinstance(group, dist.ProcessGroup):
        return False
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


def join_groups(settings: MegatronSettings, *, seed: int) -> Place:
    """Megatron's groups over torch's default one, which is there already. Process-wide, as Megatron keeps them.

    Raises ConfigError when this process has them already, cut otherwise.
    """
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": settings.tensor_model_parallel_size,
        "pipeline_model_parallel_size": settings.pipeline_model_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": settings.expert_tensor_size,
    }
    settings.data_parallel_size(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized() and not _are_of_this_group():
        parallel_state.destroy_model_parallel()  # of a trainer that was closed in this process
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    place = Place(
        tensor=_in_group("tensor_model_parallel"),
        pipeline=_in_group("pipeline_model_parallel"),
        data=_in_group("data_parallel"),
        expert=_in_group("expert_model_parallel"),
        expert_tensor=_in_group("expert_tensor_parallel"),
    )
    if [place.tensor[1], place.pipeline[1], place.expert[1], place.expert_tensor[1]] != list(sizes.values()):
        raise ConfigError("megatron's groups exist in this process already, with other sizes")
    return place


def _in_group(name: str) -> tuple[int, int]:
    return (
        getattr(parallel_state, f"get_{name}_rank")(),
        getattr(parallel_state, f"get_{name}_world_size")(),
    )


def build(
    shape: Shape,
    torch_settings: TorchSettings,
    settings: MegatronSettings,
    place: Place,
    *,
    trained: bool = True,
) -> Any:
    """This rank's part, whose weights are not set yet. One that is not `trained` has no gradients and no wrapper for
    them. Raises ConfigError for what megatron-core or this machine lacks.
    """
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it logs whole configurations, and advertises
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers: Any = _layers(shape, torch_settings, settings, place)
        config = transformer_config(shape, torch_settings, settings)
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=shape.padded_vocab(place.tensor[1]),
            max_sequence_length=shape.max_length,
            pre_process=place.is_first_stage,
            post_process=place.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.is_tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,  # pyright: ignore[reportArgumentType] it may be any number
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 8.0,
        )
        model.to(torch.device(torch_settings.device))
        _mark_what_is_cut(model)
        if place.is_last_stage:
            _take_whole_sequences(model.output_layer, place)
        inner = Float16Module(config, model) if config.bf16 else model
        if not trained:
            return inner.requires_grad_(False).train()
        wrapped = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
            ),
            module=inner,
        )
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = _finalize
    return (
        wrapped.train()
    )  # as Megatron's recomputation wants it; there is no dropout that it could switch on


def transformer_config(
    shape: Shape, torch_settings: TorchSettings, settings: MegatronSettings
) -> TransformerConfig:
    dtype = getattr(torch, torch_settings.dtype)
    pipelined = settings.pipeline_model_parallel_size > 1
    experts: dict[str, Any] = {}
    if shape.experts is not None:
        experts = {
            "num_moe_experts": shape.experts.count,
            "moe_router_topk": shape.experts.per_token,
            "moe_ffn_hidden_size": shape.experts.ffn_size,
            # softmax over the chosen ones is softmax over all, normalized to sum 1 over the chosen
            "moe_router_pre_softmax": not shape.experts.normalizes,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_layer_freq": [int(each) for each in shape.experts.in_layer],
        }
    return TransformerConfig(
        num_layers=shape.n_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.n_heads,
        num_query_groups=shape.n_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_size,
        sequence_parallel=settings.sequence_parallel,
        moe_token_dispatcher_type="alltoall",  # the default cannot have the following, also without experts
        variable_seq_lengths=pipelined,  # micro-batches differ in shape
        deallocate_pipeline_outputs=pipelined,
        recompute_granularity=settings.recompute_granularity,
        recompute_method=settings.recompute_method,
        recompute_num_layers=settings.recompute_num_layers,
        calculate_per_token_loss=True,  # gradients are sums
        deterministic_mode=torch_settings.deterministic,
        use_cpu_initialization=devices.named(torch_settings.device).needs_cpu_init,
        perform_initialization=False,  # all weights come from files
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        **experts,
    )


def _layers(
    shape: Shape, torch_settings: TorchSettings, settings: MegatronSettings, place: Place
) -> TransformerBlockSubmodules:
    """The layers of this stage, and the norm after the last one."""
    norm: Any = RmsNorm
    per_stage = shape.n_layers // place.pipeline[1]
    numbers = range(place.pipeline[0] * per_stage, (place.pipeline[0] + 1) * per_stage)
    made: dict[bool, Any] = {}
    for number in numbers:
        has_experts = shape.experts is not None and shape.experts.in_layer[number]
        if has_experts not in made:
            made[has_experts] = _layer(shape, torch_settings, settings, has_experts)
    layers = [made[shape.experts is not None and shape.experts.in_layer[number]] for number in numbers]
    if settings.transformer_impl == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer(shape: Shape, torch_settings: TorchSettings, settings: MegatronSettings, has_experts: bool) -> Any:
    kind: dict[str, Any] = {
        "num_experts": shape.experts.count if shape.experts and has_experts else None,
        "moe_grouped_gemm": False,
        "qk_layernorm": shape.qk_norm,
    }
    if settings.transformer_impl == "transformer_engine":
        try:
            import transformer_engine  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                'trainer.megatron.transformer_impl = "transformer_engine": it cannot be imported '
                f'({error}); install it, or use "local"'
            ) from error
        return get_gpt_layer_with_transformer_engine_spec(**kind)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]  # 0.16.1 forgets to say so
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **kind)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if torch_settings.attn_implementation == "sdpa":
        attention.core_attention = SdpaAttention
    elif torch_settings.packing:
        raise ConfigError(
            f'trainer.packing = true with model.attn_implementation = "{torch_settings.attn_implementation}": the '
            'megatron trainer packs rows with "sdpa" only'
        )
    elif torch_settings.attn_implementation != "eager":
        raise ConfigError(
            f'model.attn_implementation = "{torch_settings.attn_implementation}": the megatron trainer has "sdpa", '
            '"eager", and Transformer Engine\'s own with trainer.megatron.transformer_impl = "transformer_engine"'
        )
    return layer


def _mark_what_is_cut(model: Any) -> None:
    """Norms of gradients count what is not cut over tensor-parallel ranks once. Megatron marks it as it draws initial
    weights, which it does not do here.
    """
    for name, parameter in model.named_parameters():
        axis = weight_of(name).axis
        parameter.tensor_model_parallel = axis is not None
        parameter.partition_dim = -1 if axis is None else axis
        parameter.partition_stride = 1


def _take_whole_sequences(output_layer: Any, place: Place) -> None:
    """The output layer is fed trained positions of gathered sequences, not this rank's part of a sequence."""
    output_layer.sequence_parallel = False
    output_layer.allreduce_dgrad = place.tensor[1] > 1


def _finalize(model: list[Any], num_tokens: Any = None, **groups: Any) -> None:
    """Sums over ranks; Megatron would go on to divide by the number of tokens."""
    finalize_model_grads(model, None, **groups)
