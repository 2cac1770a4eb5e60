"""The seven points of an accelerator, each with a fault planted. No accelerator here: what torch would say is planted
too, by a stand-in module in a process of its own, or by the facts that a probe judges (simulated)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine.doctor import accelerator, collectives, megatron, memory_saver, ray_workers, sglang, transport
from engine.doctor.accelerator import Seen
from engine.doctor.collectives import Library
from engine.doctor.ray_workers import Worker
from engine.doctor.result import SIMULATED, Request, Result
from engine.doctor.two_ranks import RanksFailed, together
from engine.settings import (
    Config,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SGLangConfig,
    TrainerConfig,
    WeightsConfig,
)

ROOT = Path(__file__).parents[3]

# Answers as torch does on a machine with as many CUDA or MUSA devices as asked for.
FAKE_TORCH = """
import os
__version__ = "2.9.1"
bfloat16 = "bfloat16"
class _Value:
    def __init__(self, value): self.value = value
    def __matmul__(self, other): return self
    def __getitem__(self, where): return self
    def float(self): return self
    def __float__(self): return self.value
def ones(*shape, device, dtype): return _Value({value})
class _Device:
    def is_available(self): return {count} > 0
    def device_count(self): return {count}
    def get_device_name(self, index): return "a card"
    def get_device_capability(self, index): return (9, 0)
{kind} = _Device()
class version:
    {version}
"""


def request(device: str = "cpu", *, found: str = "", **sections) -> Request:
    config = Config(
        run=sections.pop("run", RunConfig()),
        model=ModelConfig(device=device, path=sections.pop("path", "")),
        reward=RewardConfig(function="exact"),
        **sections,
    )
    return Request(config=config, has_config=True, accelerator=found or device.partition(":")[0])  # type: ignore[arg-type]


def on_a_torch(folder: Path, asked: Request, environ: dict[str, str], **planted: object) -> Result:
    """The probe of the accelerator, with this stand-in for torch."""
    values = {"value": 256.0, "count": 1, "kind": "cuda", "version": "cuda = '13.0'", **planted}
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(FAKE_TORCH.format(**values))
    clean = {k: v for k, v in os.environ.items() if not k.endswith("VISIBLE_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-m", "engine.doctor.child", "engine.doctor.accelerator:probe", str(os.getpid())],
        input=msgspec.json.encode(asked),
        capture_output=True,
        env={**clean, "PYTHONPATH": f"{folder}:{ROOT}", **environ},
        cwd=ROOT,
        timeout=100,
        check=True,
    )
    return msgspec.json.decode(done.stdout.rpartition(b"\0")[2], type=Result)


# -- (a)


def test_a_device_that_computes_passes_with_its_name(tmp_path: Path) -> None:
    result = on_a_torch(tmp_path, request("cuda"), {"CUDA_VISIBLE_DEVICES": "0"})
    assert (result.status, result.facts["n_devices"]) == ("pass", 1)
    assert "1 × a card, capability 9.0" in result.evidence


def test_a_mask_that_names_devices_which_are_not_there_fails(tmp_path: Path) -> None:
    result = on_a_torch(tmp_path, request("cuda"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert result.status == "fail"
    assert result.evidence.startswith("CUDA_VISIBLE_DEVICES names 2 devices, torch sees 1")


def test_a_musa_mask_is_judged_by_its_own_variable(tmp_path: Path) -> None:
    planted = {"kind": "musa", "version": "musa = '4.3'", "count": 2}
    result = on_a_torch(tmp_path, request("musa"), {"MUSA_VISIBLE_DEVICES": "0,1,2"}, **planted)
    assert result.status == "fail"
    assert "MUSA_VISIBLE_DEVICES names 3 devices, torch sees 2" in result.evidence


def test_a_mask_that_hides_every_device_is_named(tmp_path: Path) -> None:
    result = on_a_torch(tmp_path, request("cuda"), {"CUDA_VISIBLE_DEVICES": "7"}, count=0)
    assert result.status == "fail"
    assert "CUDA_VISIBLE_DEVICES='7'" in result.evidence
    assert result.remedy.startswith("CUDA_VISIBLE_DEVICES may hide it")
    assert result.facts["accelerator"] == "cpu", "later probes must not try a device that is not there"


def test_a_device_that_computes_wrongly_fails(tmp_path: Path) -> None:
    result = on_a_torch(tmp_path, request("cuda"), {}, value=255.0)
    assert result.status == "fail"
    assert "gave 255 instead of 256" in result.evidence


def test_a_device_number_beyond_the_last_fails(tmp_path: Path) -> None:
    result = on_a_torch(tmp_path, request("cuda:2"), {}, count=2)
    assert result.status == "fail"
    assert result.remedy == 'set model.device to "cuda:0" … 1'


def test_a_device_named_musa_without_its_plugin_is_simulated_and_never_a_pass(tmp_path: Path) -> None:
    result = on_a_torch(tmp_path, request("musa"), {}, kind="musa", version="cuda = None")
    assert (result.status, result.evidence) == ("skip", SIMULATED)


def test_musa_asked_for_without_torch_musa_fails_with_the_way_to_get_it() -> None:
    result = accelerator.judge(Seen("2.15.0", "musa"), "musa", {})
    assert result.status == "fail"
    assert "--no-deps" in result.remedy


def test_unequal_releases_of_torch_and_torch_musa_are_a_warning() -> None:
    seen = Seen("2.9.1.post1", "musa", True, 1, "MTT S5000", (3, 1), 256.0, plugin="2.7.1")
    assert accelerator.judge(seen, "musa", {}).status == "warn"
    assert accelerator.judge(seen._replace(plugin="2.9.1+musa5.2"), "musa", {}).status == "pass"


def test_a_torch_without_the_devices_that_the_machine_has_is_a_warning() -> None:
    assert accelerator.judge(Seen("2.15.0+cpu", "cpu", listed=8), "", {}).status == "warn"


# -- (b)

FACTS = {
    "versions": {"python": "3.11", "sglang": "0.5.23", "torch": "2.13.0"},
    "architectures": ["Qwen3ForCausalLM"],
    "attention_backends": ["triton", "torch_native", "flashinfer", "fa3", "fa4"],
    "endpoints": [
        *("/update_weights_from_disk", "/pause_generation", "/continue_generation", "/begin_weight_update"),
    ],
    "modules": ["triton", "sgl_kernel"],
}


def engine(device: str, *args: str, path: str = "", capability: tuple[int, int] | None = None) -> Request:
    rollout = RolloutConfig(backend="sglang", sglang=SGLangConfig(args=args))
    return msgspec.structs.replace(request(device, rollout=rollout, path=path), capability=capability)


def model(folder: Path, **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return str(folder)


def test_an_architecture_that_sglang_lacks_fails_by_name(tmp_path: Path) -> None:
    path = model(tmp_path / "model", architectures=["NewestForCausalLM"])
    result = sglang.judge(engine("cuda", path=path), FACTS)
    assert result.status == "fail"
    assert "no architecture NewestForCausalLM among its 1" in result.evidence
    path = model(tmp_path / "model", architectures=["Qwen3ForCausalLM"])
    assert sglang.judge(engine("cuda", path=path), FACTS).status == "pass"


@pytest.mark.parametrize(
    ("device", "capability", "backend", "said"),
    [
        ("cuda", (7, 5), "fa3", "needs capability 8.0 or more, there is 7.5"),
        ("cuda", (9, 0), "flashinfer", "needs the module flashinfer"),
        ("cuda", (9, 0), "fa9", "this sglang has triton"),
        ("musa", (2, 2), "fa3", "needs capability 3.1 or more, there is 2.2"),
        ("musa", (3, 1), "fa3", "needs the module flash_attn_interface"),
        ("musa", (3, 1), "flashinfer", "on MUSA only fa3, triton"),
    ],
)
def test_an_attention_backend_that_cannot_run_here_fails(
    device: str, capability: tuple[int, int], backend: str, said: str
) -> None:
    result = sglang.judge(engine(device, "--attention-backend", backend, capability=capability), FACTS)
    assert result.status == "fail"
    assert said in result.evidence


def test_triton_runs_on_both_and_fa3_on_hopper() -> None:
    for device, backend in (("cuda", "triton"), ("musa", "triton"), ("cuda", "fa3")):
        asked = engine(device, f"--attention-backend={backend}", capability=(9, 0))
        assert sglang.judge(asked, FACTS).status == "pass", (device, backend)


def test_what_sglang_on_musa_refuses_is_said_before_a_start(tmp_path: Path) -> None:
    quantised = model(tmp_path / "awq", quantization_config={"quant_method": "awq"})
    assert "AWQ" in sglang.judge(engine("musa", path=quantised), FACTS).evidence
    assert sglang.judge(engine("musa"), {**FACTS, "is_musa": "False"}).status == "fail"
    flag = "--enable-prefill-context-parallel"
    assert sglang.judge(engine("musa", flag), FACTS).status == "fail"


def test_an_sglang_that_is_too_old_or_lacks_an_endpoint_is_told() -> None:
    old = {**FACTS, "versions": {**FACTS["versions"], "sglang": "0.5.6.post2"}}
    assert sglang.judge(engine("cpu"), old).status == "fail"
    lacking = {**FACTS, "endpoints": FACTS["endpoints"][:-1]}
    result = sglang.judge(engine("cpu"), lacking)
    assert result.status == "warn" and "no /begin_weight_update" in result.evidence


def test_an_interpreter_without_sglang_fails(tmp_path: Path) -> None:
    rollout = RolloutConfig(backend="sglang", sglang=SGLangConfig(python=sys.executable))
    result = sglang.probe(request(rollout=rollout))
    assert result.status == "fail"
    assert "no sglang in this environment" in result.evidence


# -- (c)


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("megatron.core")
    folder = tmp_path / "musa_patch"
    folder.mkdir()
    monkeypatch.setenv("MUSA_PATCH_PATH", str(folder))
    monkeypatch.delenv("MUSA_TITAN_PATH", raising=False)
    return folder


def test_a_patch_of_another_megatron_fails_and_names_symbol_file_and_release(patch: Path) -> None:
    (patch / "training.py").write_text(
        "import megatron.core\n"
        "from megatron.core.process_groups_config import GradFinalizeProcessGroups\n"
        "def apply():\n    from megatron.core.no_such_module import anything\n"
    )
    result = megatron.probe(request(trainer=TrainerConfig(backend="megatron")))
    assert result.status == "fail"
    assert "lacks 2 names" in result.evidence
    assert (
        "megatron.core.process_groups_config.GradFinalizeProcessGroups (training.py:2: no such name)"
        in result.evidence
    )
    assert "made for megatron-core 0.14.0 alone" in result.remedy


def test_a_patch_whose_names_are_there_is_no_pass_without_the_hardware(patch: Path) -> None:
    (patch / "VERSION").write_text("1")
    (patch / "training.py").write_text(
        "from megatron.core import parallel_state\n"
        "try:\n    from megatron.core.gone import gone\nexcept ImportError:\n    gone = None\n"
    )
    result = megatron.probe(request(trainer=TrainerConfig(backend="megatron")))
    assert result.status == "warn"
    assert f"1 names of the patch are there; it was not imported ({SIMULATED})" in result.evidence


def test_a_patch_without_a_version_and_a_folder_without_a_patch_are_told(patch: Path) -> None:
    (patch / "training.py").write_text("from megatron.core import parallel_state\n")
    assert "no version of its own" in megatron.probe(request()).evidence
    (patch / "training.py").write_text("import os\n")
    assert "nothing in it imports megatron" in megatron.probe(request()).evidence
    (patch / "training.py").unlink()
    patch.rmdir()
    assert "no such folder" in megatron.probe(request()).evidence


# -- (d)


@pytest.mark.parametrize(
    ("library", "asked", "environ", "status", "said"),
    [
        (Library("musa", True, "2.4", is_simulated=True), "auto", {}, "skip", SIMULATED),
        (Library("musa", True, "2.4"), "nccl", {}, "fail", 'weights.backend = "nccl" on MUSA'),
        (Library("cuda", True, "2.27"), "mccl", {}, "fail", 'weights.backend = "mccl" on CUDA'),
        (Library("musa", False, ""), "auto", {}, "fail", "no backend mccl"),
        (Library("musa", True, "2.4", "libmccl.so.2: not found"), "auto", {}, "fail", "libmccl.so.2"),
        (Library("musa", True, "2.4"), "auto", {"NCCL_IB_HCA": "x"}, "warn", "NCCL_IB_HCA set"),
    ],
)
def test_what_is_wrong_with_a_collective_library_is_told_before_ranks_meet(
    library: Library, asked: str, environ: dict[str, str], status: str, said: str
) -> None:
    result = collectives.judge(library, asked, environ)
    assert result is not None and result.status == status and said in result.evidence


def test_an_nccl_variable_with_its_mccl_twin_is_fine() -> None:
    environ = {"NCCL_IB_HCA": "x", "MCCL_IB_HCA": "x"}
    assert collectives.judge(Library("musa", True, "2.4"), "auto", environ) is None


def test_a_sum_that_is_wrong_or_bytes_that_differ_fail() -> None:
    rank = {"sum": 3.0, "is_sum_right": True, "digest": "a", "seconds": 0.1}
    assert collectives.judge_ranks([rank, rank], "gloo").status == "pass"
    assert collectives.judge_ranks([rank, {**rank, "digest": "b"}], "gloo").status == "fail"
    assert (
        collectives.judge_ranks([rank, {**rank, "sum": 1.0, "is_sum_right": False}], "gloo").status == "fail"
    )
    assert collectives.judge_ranks([rank, rank], "nccl", slow=1e9).status == "warn"


def test_a_rank_that_fails_is_named_with_its_last_line() -> None:
    pytest.importorskip("torch")
    with pytest.raises(RanksFailed, match=r"no_such_library: rank [01]: .*no_such_library"):
        together("no_such_library", "cpu", 1024, 100.0)


# -- (e)


def saver(kind: str, wanted: bool, libraries: list[Path] | None, said: dict | None = None) -> Result:
    return memory_saver.judge(request(kind), wanted, libraries, lambda: said)


def test_a_memory_saver_without_musa_symbols_fails_where_it_is_asked_for(tmp_path: Path) -> None:
    upstream, vendor = tmp_path / "upstream.abi3.so", tmp_path / "vendor.abi3.so"
    upstream.write_bytes(b"\x7fELF cudaMalloc cuMemMap")
    vendor.write_bytes(b"\x7fELF muMemMap")
    assert saver("musa", True, [upstream]).status == "fail"
    assert saver("musa", False, [upstream]).status == "warn"
    assert saver("musa", True, [vendor]).status == "warn", "what was not tried is no pass"
    assert saver("cuda", False, None).status == "skip"


@pytest.mark.parametrize(
    "fault",
    [{"freed": 0}, {"same": False}, {"graph": False}],
    ids=["nothing freed", "content lost", "graph wrong"],
)
def test_a_memory_saver_that_frees_nothing_or_loses_something_fails(fault: dict, tmp_path: Path) -> None:
    well = {"freed": 256 << 20, "size": 256 << 20, "same": True, "graph": True}
    assert saver("cuda", True, [tmp_path], well).status == "pass"
    assert saver("cuda", True, [tmp_path], {**well, **fault}).status == "fail"


# -- (f)


def test_a_transport_that_this_hardware_has_not_fails() -> None:
    nccl = WeightsConfig(transport="distributed", backend="nccl")
    assert transport.probe(request("musa", weights=nccl)).status == "fail"
    assert transport.probe(request("musa", weights=WeightsConfig(transport="ipc"))).status == "fail"
    assert transport.probe(request("cpu", weights=WeightsConfig(transport="ipc"))).status == "pass"


def test_a_port_of_the_trainer_that_is_taken_fails_with_the_port() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        weights = WeightsConfig(transport="distributed", master_address="127.0.0.1", master_port=port)
        result = transport.probe(request(weights=weights))
        assert result.status == "fail" and f"127.0.0.1:{port}" in result.evidence
    assert transport.probe(request(weights=weights)).status == "pass"


def test_an_address_that_no_other_node_reaches_fails_with_other_nodes() -> None:
    weights = WeightsConfig(transport="distributed", master_address="127.0.0.1")
    alone = request(weights=weights)
    assert transport.probe(alone).status == "pass"
    assert transport.probe(msgspec.structs.replace(alone, peers=("10.0.0.2:1",))).status == "fail"


def test_weights_on_a_full_disk_fail(tmp_path: Path) -> None:
    path = model(tmp_path / "model", architectures=[])
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    result = transport.probe(request(path=path, run=RunConfig(dir=str(tmp_path / "run"))))
    assert result.status == "fail"
    assert "two versions of the model are 2097152 MiB" in result.evidence


# -- (g)


def worker(mask: str | None, ids: list[str], node: str = "a", **changes: object) -> Worker:
    masks = {} if mask is None else {"MUSA_VISIBLE_DEVICES": mask}
    return Worker(node, masks, ids, True, [], "3.10.12", False)._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([worker("0", ["0"]), worker("0", ["0"])], "two workers on a have device 0"),
        ([worker("0", ["0"], missing=["MUSA_PATCH_PATH"])], "MUSA_PATCH_PATH did not arrive on a"),
        ([worker("0", ["0"], had_torch=True)], "torch was imported before"),
        ([worker("0", ["0"]), worker("1", ["1"], python="3.11.2")], "Python 3.10.12, 3.11.2"),
    ],
)
def test_workers_of_ray_that_share_a_device_or_lack_a_variable_fail(workers: list[Worker], said: str) -> None:
    result = ray_workers.judge(workers, "musa", 1, 8)
    assert result.status == "fail" and said in result.evidence


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (
            [worker("0,1", ["0"]), worker("0,1", ["1"])],
            "MUSA_VISIBLE_DEVICES=0,1 in a worker that Ray gave device 0",
        ),
        ([worker(None, ["0"])], "MUSA_VISIBLE_DEVICES is not set"),
    ],
)
def test_masks_that_stock_ray_does_not_set_are_a_warning_since_our_launcher_sets_them(
    workers: list[Worker], said: str
) -> None:
    result = ray_workers.judge(workers, "musa", 1, 8)
    assert result.status == "warn" and said in result.evidence
    assert "--launcher ray` sets it" in result.remedy


def test_workers_with_a_device_each_pass_and_many_cpus_are_a_warning() -> None:
    workers = [worker("0", ["0"]), worker("1", ["1"]), worker("0", ["0"], node="b")]
    assert ray_workers.judge(workers, "musa", 2, 8).status == "pass"
    assert ray_workers.judge(workers, "musa", 2, 255).status == "warn"
