"""What the megatron trainer reads from a Hugging Face configuration, and what it refuses in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine.trainer.megatron.settings import MegatronSettings
from engine.trainer.megatron.shape import check_cut, read_shape, shape_of
from engine.trainer.megatron.start import megatron_settings, refuse_what_others_have
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError
from tests.engine.megatron.models import configuration


def test_a_dense_model_is_read_with_its_own_numbers(tmp_path: Path) -> None:
    configuration("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(
        tmp_path
    )
    shape = read_shape(tmp_path)
    assert (shape.n_heads, shape.n_groups, shape.head_dim, shape.ffn_size) == (4, 2, 8, 24)
    assert (shape.rope_theta, shape.rope_factor, shape.norm_eps) == (5e5, None, 1e-6)
    assert shape.is_tied and shape.qk_norm and not shape.qkv_bias and shape.experts is None


def test_llamas_scaling_of_positions_and_qwen2s_biases_are_known() -> None:
    llama = shape_of(configuration("llama"))
    assert (llama.rope_theta, llama.rope_factor, llama.norm_eps, llama.head_dim) == (500.0, 32.0, 1e-5, 4)
    assert shape_of(configuration("qwen2")).qkv_bias


def test_layers_with_experts_are_those_of_the_configuration() -> None:
    config = configuration("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    experts = shape_of(config).experts
    assert experts is not None and experts.in_layer == (False, True, False, False)
    assert (experts.count, experts.per_token, experts.ffn_size, experts.normalizes) == (4, 2, 12, True)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **values}}


@pytest.mark.parametrize(
    ("name", "other", "sentence"),
    [
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding windows",
        ),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", rope(rope_type="yarn", factor=4.0), "rope_type 'yarn'"),
        ("qwen3", rope(rope_type="linear", factor=4.0), "rope_type 'linear'"),
        (
            "llama",
            rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=2.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
            "Megatron has",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_megatron_would_build_differently_is_refused(
    name: str, other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shape_of(configuration(name, **other))


def test_an_unknown_family_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model_type 'gpt2' \(known are llama, qwen2, qwen3, qwen3_moe\)"):
        read_shape(tmp_path)
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        read_shape(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "cut", "sentence"),
    [
        ("qwen3", {"tensor_model_parallel_size": 4}, "2 heads of keys and values, no multiple"),
        ("qwen3", {"pipeline_model_parallel_size": 3}, "2 layers, no multiple"),
        ("qwen3", {"expert_model_parallel_size": 2}, "no experts"),
        ("qwen3_moe", {"expert_model_parallel_size": 3}, "4 experts, no multiple"),
        ("qwen3_moe", {"tensor_model_parallel_size": 2}, "only with sequence_parallel = true"),
    ],
)
def test_a_cut_that_does_not_fit_the_model_is_refused(name: str, cut: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_cut(shape_of(configuration(name)), MegatronSettings(**cut))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sequence_parallel": True}, "tensor_model_parallel_size is 1"),
        ({"recompute_granularity": "full"}, "needs both"),
        ({"recompute_method": "uniform"}, "go with recompute_granularity"),
        ({"tensor_model_parallel_size": "2"}, "Expected `int`"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        megatron_settings(options)


def test_the_number_of_ranks_must_be_whole_models() -> None:
    settings = MegatronSettings(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert settings.data_parallel_size(8) == 2
    with pytest.raises(
        ConfigError, match="multiple of tensor_model_parallel_size × pipeline_model_parallel_size = 4"
    ):
        settings.data_parallel_size(6)
    with pytest.raises(ConfigError, match="expert_model_parallel_size"):
        MegatronSettings(expert_model_parallel_size=4).data_parallel_size(2)


def test_adapters_and_critics_are_refused() -> None:
    with pytest.raises(ConfigError, match="lora"):
        refuse_what_others_have(TorchSettings(lora_rank=8))
    with pytest.raises(ConfigError, match="critic"):
        refuse_what_others_have(TorchSettings(advantage_estimator="ppo"))
    refuse_what_others_have(TorchSettings())
