"""A Hugging Face model cut over the ranks with FSDP2, without a whole copy of it on any rank but 0.

    rank 0: the model in main memory (float32)         all ranks: the same modules without memory (`meta`)
                       │ one weight at a time, broadcast                │
                       └───────────► a decoder layer, whole ◄───────────┘
                                         └─► fully_shard: each rank keeps its rows of each weight, and so on

So no rank holds more than its own shards and one layer; what is left (embeddings, norm, head) is one unit, the root.
Gradients are summed over ranks, since losses carry the divisors of the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from engine import devices
from engine.algorithms import norms, packing
from engine.trainer.fsdp2_settings import Fsdp2Settings
from engine.trainer.parts import Processes
from engine.trainer.torch_backend import load_model
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError


def build(
    folder: Path,
    settings: TorchSettings,
    options: Fsdp2Settings,
    processes: Processes,
    *,
    key: str = "model.path",
    is_trained: bool = True,
) -> nn.Module:
    """Collective. The sharded model, in evaluation mode (no dropout). `key` names the folder in errors.

    Raises ConfigError.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(f'trainer.backend = "fsdp2" needs torch 2.8 or newer; this is {torch.__version__}')
    source = load_model(folder, settings, key=key) if processes.rank == 0 else None
    model = _shell(folder, settings, key)
    filler = _Filler(model, source, processes)
    filler.fill_state()
    mesh = init_device_mesh(processes.device.type, (processes.size,))
    # a single rank holds every layer whole anyway
    reshards = options.reshard_after_forward and processes.size > 1
    if is_trained:  # else a forward would drop what the micro-batch before has kept
        reshards = reshards and options.sync_each_micro_batch
    for layer in decoder_layers(model):
        filler.fill(layer)
        if options.activation_checkpointing and is_trained:
            _recompute(layer)
        _shard(layer, mesh, settings, options, reshard=reshards)
    filler.fill(model)
    _shard(model, mesh, settings, options, reshard=not is_trained and reshards)
    if settings.packing:
        packing.use_in(model)
    norms.use_in(model, processes.device)
    return model.requires_grad_(is_trained)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded each by itself: what the model says must not be split, or else its first list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        found = list(lists[0]) if lists else []
    if not found:
        raise ConfigError(f'trainer.backend = "fsdp2": {type(model).__name__} has no list of layers to shard')
    return found


def _shell(folder: Path, settings: TorchSettings, key: str) -> Any:
    """The model's modules, without memory for their weights."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {str(folder)!r}: cannot be loaded ({error})") from error
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=settings.attn_implementation
        )
    return model.eval()


class _Filler:
    """Gives modules that are on `meta` real memory, with the bits that rank 0 has."""

    def __init__(self, model: nn.Module, source: nn.Module | None, processes: Processes) -> None:
        self._model, self._source, self._processes = model, source, processes
        self._made: dict[
            int, nn.Parameter
        ] = {}  # id of a parameter on meta → the real one, so that ties stay
        self._kept: list[nn.Parameter] = []  # an id is a name only while its owner lives

    def fill(self, module: nn.Module) -> None:
        """All parameters below `module` that are on meta still."""
        below = set(map(id, module.modules()))
        for path, owner in self._model.named_modules():
            if id(owner) not in below:
                continue
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_meta:
                    owner._parameters[name] = self._real(path, name, parameter)

    def _real(self, path: str, name: str, parameter: nn.Parameter) -> nn.Parameter:
        made = self._made.get(id(parameter))
        if made is None:
            made = nn.Parameter(self._bits_of(path, name, parameter))
            self._made[id(parameter)] = made
            self._kept.append(parameter)
        return made

    def fill_state(self) -> None:
        """Buffers, and tensors that a module keeps as plain attributes (frequencies of rotary embeddings)."""
        for path, owner in self._model.named_modules():
            for names in (owner._buffers, vars(owner)):
                for name, value in names.items():
                    if isinstance(value, Tensor) and value.is_meta:
                        names[name] = self._bits_of(path, name, value)

    @torch.no_grad()
    def _bits_of(self, path: str, name: str, meta: Tensor) -> Tensor:
        real = torch.empty(meta.shape, dtype=meta.dtype, device=self._processes.device)
        if self._source is not None:
            real.copy_(getattr(self._source.get_submodule(path), name))
        if self._processes.size > 1:
            dist.broadcast(real, 0)
        return real


def _shard(
    module: nn.Module, mesh: DeviceMesh, settings: TorchSettings, options: Fsdp2Settings, *, reshard: bool
) -> None:
    precision = MixedPrecisionPolicy()
    if settings.dtype != "float32":
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32
        )
    offload = OffloadPolicy()
    if options.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=devices.named(mesh.device_type).has_pinned_memory())
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(
        True
    )  # else a divide factor asks for an operation of NCCL's alone


def keep_whole(model: nn.Module, *, keep: bool) -> None:
    """Whether the next backward leaves whole weights and whole gradients (float32, as they would be summed) where they
    are, so that the next micro-batch needs no collective. The last one of a step must not: it gives each rank its
    shard."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(not keep)
    model.set_reshard_after_backward(not keep)


def _recompute(layer: nn.Module) -> None:
    """Keep a layer's inputs alone, and run it again in the backward. There is no dropout, so nothing random in it."""
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = run


def named_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each distinct parameter by its first name: a DTensor, cut along its first dimension."""
    yield from model.named_parameters()
