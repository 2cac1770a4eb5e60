"""What Megatron needs to know of a Hugging Face model, read from its configuration, or the sentence why it cannot be.

Whatever is not understood is refused: a model that is built a little wrong trains all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from engine.trainer.megatron.settings import MegatronSettings
from streams.errors import ConfigError

# Hugging Face model_type → what sets the family apart
FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "qwen3_moe": {"qkv_bias": False, "qk_norm": True},
}
# Llama 3's rotary scaling as Megatron has it, but for `factor`
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Experts(NamedTuple):
    count: int
    per_token: int
    ffn_size: int
    normalizes: bool  # the weights of the chosen experts are made to sum to 1
    in_layer: tuple[bool, ...]  # [layers] whether its feed-forward part has experts, or is a dense one


class Shape(NamedTuple):
    model_type: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_groups: int  # heads of keys and values
    head_dim: int
    ffn_size: int
    norm_eps: float
    is_tied: bool  # input embedding and output layer are one tensor
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_factor: float | None  # of Llama 3's scaling
    max_length: int
    experts: Experts | None

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding: as many on each rank, so the last ones may stand for no token."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def read_shape(folder: Path, key: str = "model.path") -> Shape:
    """Raises ConfigError for what Megatron would build differently; `key`: the setting that names the folder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{key} = {str(folder)!r}: no readable config.json ({error})") from error
    return shape_of(config)


def shape_of(config: Any) -> Shape:
    """Raises ConfigError."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise _refused(
            config, f"model_type {config.model_type!r}", f"known are {', '.join(sorted(FAMILIES))}"
        )
    for refused, instead in _unknown_parts(config):
        raise _refused(config, refused, instead)
    theta, factor = _rope(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_groups=config.num_key_value_heads,
        head_dim=head_dim,
        ffn_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        is_tied=bool(config.tie_word_embeddings),
        qkv_bias=family["qkv_bias"],
        qk_norm=family["qk_norm"],
        rope_theta=theta,
        rope_factor=factor,
        max_length=config.max_position_embeddings,
        experts=_experts(config) if config.model_type == "qwen3_moe" else None,
    )


def check_cut(shape: Shape, settings: MegatronSettings) -> None:
    """Raises ConfigError for a model that cannot be cut as the settings say."""
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    cut = [
        ("tensor_model_parallel_size", tensor, "attention heads", shape.n_heads),
        ("tensor_model_parallel_size", tensor, "heads of keys and values", shape.n_groups),
        ("tensor_model_parallel_size", tensor, "intermediate_size", shape.ffn_size),
        ("pipeline_model_parallel_size", pipeline, "layers", shape.n_layers),
    ]
    if shape.experts is not None:
        parallel, size = settings.expert_model_parallel_size, settings.expert_tensor_size
        cut.append(("expert_model_parallel_size", parallel, "experts", shape.experts.count))
        cut.append(("expert_tensor_parallel_size", size, "moe_intermediate_size", shape.experts.ffn_size))
    for name, size, what, count in cut:
        if count % size:
            raise ConfigError(
                f"trainer.megatron.{name} = {size}: the model has {count} {what}, no multiple of it"
            )
    if shape.experts is None and settings.expert_model_parallel_size > 1:
        raise ConfigError(
            f"trainer.megatron.expert_model_parallel_size = {settings.expert_model_parallel_size}: the model has "
            "no experts; set it to 1"
        )
    if shape.experts is not None and tensor > 1 and not settings.sequence_parallel:
        raise ConfigError(
            "trainer.megatron.sequence_parallel = false: Megatron trains a model with experts over several "
            "tensor-parallel ranks only with sequence_parallel = true"
        )


def _refused(config: Any, what: str, instead: str) -> ConfigError:
    name = getattr(config, "_name_or_path", "") or config.model_type
    return ConfigError(
        f"model.path = {str(name)!r}: the megatron trainer does not know {what} ({instead}); "
        'use trainer.backend = "torch" or "fsdp2"'
    )


def _unknown_parts(config: Any) -> list[tuple[str, str]]:
    found = []
    if config.hidden_act != "silu":
        found.append((f"hidden_act {config.hidden_act!r}", "known is 'silu'"))
    kinds = set(getattr(config, "layer_types", None) or [])
    windows = kinds - {"full_attention"} or getattr(config, "use_sliding_window", False)
    # Mistral has no switch: a window is one
    if windows or (config.model_type == "llama" and getattr(config, "sliding_window", None)):
        found.append(("sliding windows", "only full attention is"))
    if getattr(config, "attention_bias", False):
        found.append(("attention_bias", "its output projection has a bias too"))
    if getattr(config, "mlp_bias", False):
        found.append(("mlp_bias", "feed-forward parts without biases are"))
    if getattr(config, "quantization_config", None):
        found.append(("quantization_config", "weights must be plain numbers"))
    return found


def _rope(config: Any) -> tuple[float, float | None]:
    """(theta, factor of Llama 3's scaling or None). Configurations of transformers 4 and 5."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    theta = rope.pop("rope_theta", None) or getattr(config, "rope_theta", None)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 or getattr(config, "partial_rotary_factor", 1.0) != 1.0:
        raise _refused(config, "partial_rotary_factor", "positions turn whole heads")
    if not isinstance(theta, (int, float)):
        raise _refused(config, "a rope_theta for each kind of layer", "one number is")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise _refused(config, f"rope_type {kind!r}", "known are 'default' and 'llama3'")
    factor = rope.pop("factor")
    if rope != _LLAMA3:
        raise _refused(config, f"rope_parameters {rope}", f"of 'llama3' Megatron has {_LLAMA3} alone")
    return float(theta), float(factor)


def _experts(config: Any) -> Experts:
    if getattr(config, "shared_expert_intermediate_size", 0):
        raise _refused(config, "shared experts", "experts that are chosen are")
    dense = set(config.mlp_only_layers or [])
    return Experts(
        count=getattr(config, "num_experts", None) or config.num_local_experts,
        per_token=config.num_experts_per_tok,
        ffn_size=config.moe_intermediate_size,
        normalizes=bool(config.norm_topk_prob),
        in_layer=tuple(
            layer not in dense and (layer + 1) % config.decoder_sparse_step == 0
            for layer in range(config.num_hidden_layers)
        ),
    )
