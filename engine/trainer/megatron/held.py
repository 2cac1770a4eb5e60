"""What this rank holds: each local parameter, the whole parameter it is a part of, and its piece of the optimizer.

parameter [local shape]  ── data-parallel rank r keeps and updates ──►  flat elements start … end of it: a master in
                                                                        float32, exp_avg, exp_avg_sq
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from engine import devices
from engine.trainer.megatron.model import Place
from engine.trainer.megatron.names import Weight, weight_of
from engine.trainer.megatron.shape import Shape
from engine.trainer.torch_settings import TorchSettings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Held(NamedTuple):
    parameter: torch.nn.Parameter
    weight: Weight
    rank: int  # among the `size` tensor-parallel ranks that it is cut over
    size: int
    is_copy: bool  # of what another pipeline stage holds (a tied output layer)


class Shard(NamedTuple):
    """The elements start … end of a flattened parameter that this rank's optimizer updates; tensors are live."""

    start: int
    end: int
    master: Tensor  # float32 [end - start]; a view of the parameter where that is in float32 itself
    moments: dict[str, Tensor]  # float32 [end - start]


def what_is_held(model: Any, shape: Shape, place: Place) -> list[Held]:
    """In Megatron's order. Raises KeyError for a parameter without a Hugging Face name."""
    first_layer = place.pipeline[0] * (shape.n_layers // place.pipeline[1])
    first_expert = place.expert[0] * (shape.experts.count // place.expert[1]) if shape.experts else 0
    held = []
    for name, parameter in _innermost(model).named_parameters():
        is_copy = shape.is_tied and name == "output_layer.weight"
        if is_copy:
            name = "embedding.word_embeddings.weight"
        weight = weight_of(name, first_layer, first_expert)
        rank, size = place.expert_tensor if weight.is_expert else place.tensor
        held.append(Held(parameter, weight, rank, size, is_copy))
    return held


def make_optimizer(model: Any, settings: TorchSettings) -> Any:
    """Megatron's distributed AdamW. Its state is made now, so that it has one shape from the beginning on."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        bf16=settings.dtype == "bfloat16",
        params_dtype=getattr(torch, settings.dtype),
        use_distributed_optimizer=True,
        clip_grad=0.0,  # the stepper decides
    )
    # no overrides: decay for all weights alike, as the other backends have it
    optimizer = get_megatron_optimizer(config, [model], config_overrides={}, use_gloo_process_groups=False)
    for each in _parts(optimizer):
        _make_state(each)
    return optimizer


def _make_state(part: Any) -> None:
    inner = part.optimizer
    if not isinstance(
        inner, torch.optim.AdamW
    ):  # Transformer Engine's or Apex's, which counts steps in its groups
        part.init_state_fn(inner, part.config)
        for group in inner.param_groups:
            group["step"] = 0
        return
    for group in inner.param_groups:
        is_fused = all(devices.named(each.device).has_fused_adamw for each in group["params"])
        group["fused"], group["foreach"] = is_fused, False
        for each in group["params"]:
            count = torch.zeros((), dtype=torch.float32, device=each.device if is_fused else "cpu")
            inner.state[each] = {"step": count, **{name: torch.zeros_like(each) for name in MOMENTS}}


def shards(optimizer: Any) -> dict[torch.nn.Parameter, Shard]:
    """Of the parameters of which this rank updates a part."""
    found: dict[torch.nn.Parameter, Shard] = {}
    for part in _parts(optimizer):
        pairs = (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
        for parameters, masters in pairs:
            for group, of_group in zip(parameters, masters, strict=True):
                for parameter, master in zip(group, of_group, strict=True):
                    place = part._get_model_param_range_map(parameter)["param"]
                    state = part.optimizer.state[master]
                    moments = {name: state[name] for name in MOMENTS}
                    found[parameter] = Shard(place.start, place.end, master, moments)
    return found


def step_count(optimizer: Any) -> int:
    """Of AdamW's own counter, which corrects its moments; the same for all weights."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
            for each in group["params"]:
                return int(part.optimizer.state[each]["step"])
    return 0


def set_step_count(optimizer: Any, count: int) -> None:
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = count
                continue
            for each in group["params"]:
                part.optimizer.state[each]["step"].fill_(count)


def publish_masters(optimizer: Any, model: Any) -> None:
    """Collective: parameters of all ranks from the masters, as after a step."""
    for part in _parts(optimizer):
        part._copy_main_params_to_model_params()
    model.start_param_sync(force_sync=True)


def _parts(optimizer: Any) -> Iterator[Any]:
    """Megatron keeps an optimizer for the dense weights and one for the experts; one without weights has no state."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def _innermost(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model
