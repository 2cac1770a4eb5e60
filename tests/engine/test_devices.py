"""What the engine asks of a device, without any but the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

from engine import devices
from engine.devices.moving import moved
from streams.errors import ConfigError


def test_naming_a_device_loads_no_torch() -> None:
    script = (
        "import sys; from engine import devices; devices.named('musa:1'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "group", "weights", "auto"),
    [
        ("cpu", "gloo", "gloo", "gloo"),
        ("cuda:1", "cpu:gloo,cuda:nccl", "nccl", "nccl"),
        ("musa", "cpu:gloo,musa:mccl", "cpu:gloo,musa:mccl", "mccl"),
    ],
)
def test_each_device_has_its_backends(name: str, group: str, weights: str, auto: str) -> None:
    device = devices.named(name)
    assert (device.name, device.group_backend, device.weight_group, device.collectives) == (
        *(name, group, weights),
        auto,
    )
    assert device.group_device_id is None


def test_what_cannot_be_had_on_musa_is_had_elsewhere() -> None:
    cpu, cuda, musa = (devices.named(kind) for kind in devices.KINDS)
    assert [each.has_ipc for each in (cpu, cuda, musa)] == [True, True, False]
    assert [each.has_fused_adamw for each in (cpu, cuda, musa)] == [True, True, False]
    assert [each.captures_graphs for each in (cpu, cuda, musa)] == [False, True, False]
    assert [each.needs_cpu_init for each in (cpu, cuda, musa)] == [True, False, True]
    assert [each.saves_from_host for each in (cpu, cuda, musa)] == [True, False, True]
    assert [each.visible_variables[:1] for each in (cpu, cuda, musa)] == [
        (),
        ("CUDA_VISIBLE_DEVICES",),
        ("MUSA_VISIBLE_DEVICES",),
    ]


def test_a_librarys_device_is_found_and_gloo_has_none() -> None:
    found = [devices.with_collectives(each) for each in ("nccl", "mccl", "gloo", "ipc")]
    assert [each and each.kind for each in found] == ["cuda", "musa", None, None]


@pytest.mark.parametrize("name", ["tpu", "xpu:0", "cuda:x", "", "musa:-1"])
def test_an_unknown_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}'"):
        devices.named(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"teacher\.device = 'cuda:1': torch .* sees no CUDA device"):
        devices.ready("cuda:1", key="teacher.device")


def test_the_cpu_is_one_for_all_ranks_and_knows_its_memory() -> None:
    cpu = devices.ready("cpu")
    assert cpu.at(3, "model.device") is cpu and cpu.torch == torch.device("cpu") and cpu.identity() == ""
    memory = cpu.memory()
    assert 0 < memory.free <= memory.total and 1 << 20 < memory.allocated <= memory.peak < memory.total


def test_a_seed_and_a_state_bring_the_same_numbers_back() -> None:
    cpu = devices.ready("cpu")
    before = cpu.rng_state()
    try:
        cpu.seed(5)
        state, first = cpu.rng_state(), torch.rand(3)
        cpu.set_rng_state(state)
        assert set(state) == {"cpu"} and torch.equal(torch.rand(3), first)
    finally:
        cpu.set_rng_state(before)


def test_cudas_switches_for_equal_bits_are_set_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    devices.named("cuda").set_deterministic(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.backends.cudnn.benchmark
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    devices.named("cuda").set_deterministic(False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and torch.backends.cudnn.benchmark


class Parting(torch.nn.Module):
    """Two names of one weight, which `to` makes anew for each, as torch does on a plug-in's device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def to(self, *_: object) -> Parting:  # pyright: ignore[reportIncompatibleMethodOverride]
        for layer in (self.first, self.second):
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        return self


def test_weights_that_were_tied_are_tied_after_a_move_that_parts_them() -> None:
    assert (parted := Parting().to("cpu")).first.weight is not parted.second.weight
    model = moved(Parting(), "cpu")
    assert model.first.weight is model.second.weight and model.first.bias is not model.second.bias
