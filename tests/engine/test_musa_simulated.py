"""MUSA without the hardware: a simulated device and MCCL (tests/support/fake_musa.py) under the real engine.

Each test that needs them runs in a process of its own. What such a simulation cannot show is listed in docs/musa.md.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engine import devices
from engine.cli import main
from engine.config import build_config, check_paths, fingerprint, load_config
from engine.roles import topics_of
from engine.rollout.sglang.server import command
from engine.settings import Config
from engine.weights.collective import group_backend
from streams.errors import ConfigError
from streams.events import EngineJoined, EngineReady, Paused, Resumed, TransferGroupEnded, TransferGroupFormed
from streams.log import EventLog
from streams.open import open_log
from streams.topics import Topics
from tests.engine import musa_cases
from tests.engine.musa_cases import CONTEXT, LONGEST_S, simulated
from tests.engine.trainer_support import folder_of, tiny_gpt2, tiny_qwen3
from tests.engine.transfer_daemons import eventually, fleet, serve_role
from tests.support.events import events, put

TABLE: dict[str, Any] = {
    "data": {"path": "x"},
    "reward": {"function": "exact"},
    "model": {"path": "m", "device": "musa"},
}


# ---------------------------------------------------------------- the device
def test_simulated_the_device_answers_by_torch_musas_names() -> None:
    answers = simulated(musa_cases.answers)
    assert answers.pop("calls") == ["synchronize"]
    assert answers == {
        "torch": "musa:1",
        "current": 1,
        "memory": (3 << 30, 4 << 30, 1 << 20, 2 << 20),  # free, total, allocated, peak
        "hardware": "fake MTT (simulated)",
        "identity": "",  # no UUID: nothing is claimed by it
        "last": "musa:1",
    }


def test_simulated_a_rank_beyond_the_devices_of_its_host_is_told_how_many_there_are() -> None:
    told = simulated(musa_cases.no_such_rank)
    assert told.startswith("ConfigError:") and "needs musa:2, which has 2 devices in all" in told


def test_simulated_seeds_and_states_of_the_devices_own_generator() -> None:
    simulated(musa_cases.generators)


def test_musa_without_torch_musa_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.device = 'musa:1'.*torch_musa is not installed.*--no-deps"
    ):
        devices.ready("musa:1")
    with pytest.raises(ConfigError, match=r"teacher\.device"):
        devices.ready("musa", key="teacher.device")


def test_what_torch_musa_raises_while_it_is_imported_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_musa.py").write_text("raise RuntimeError('needs torch 2.7.1, found 2.15')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.7\.1, found 2\.15"):
        devices.ready("musa")
    assert "torch_musa" not in sys.modules


def test_musa_without_a_device_names_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(torch, "musa", module, raising=False)
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"sees no device .*MUSA_VISIBLE_DEVICES=7.*mthreads-gmi"):
        devices.ready("musa")


# ---------------------------------------------------------------- groups
def test_simulated_a_trainers_group_has_mccl_on_the_device_and_gloo_beside_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(simulated, musa_cases.a_trainers_group, rank, str(tmp_path)) for rank in (0, 1)]
        answers = [each.result() for each in asked]
    for rank, answer in enumerate(answers):
        assert answer == {
            "backend": "cpu:gloo,musa:mccl",
            "current": rank,
            "on musa": [1.0, 1.0, 1.0],
            "on host": [1.0, 1.0, 1.0],
            "gathered": [[0.5], [1.5]],
            "mccl": ["broadcast"],  # of the one tensor on the device
        }


def test_simulated_mccl_refuses_what_lies_in_main_memory() -> None:
    told = simulated(musa_cases.refused_on_the_cpu)
    assert told == "mccl: broadcast of a tensor on cpu; MCCL takes tensors on musa alone"


# ---------------------------------------------------------------- a trainer
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen3])
def test_simulated_steps_are_those_of_the_cpu_and_a_checkpoint_goes_on_bit_for_bit(
    make: Any, tmp_path: Path
) -> None:
    model = str(folder_of(make(), tmp_path / "model"))
    on_musa = simulated(musa_cases.steps, model, "musa:0", str(tmp_path / "musa"))
    on_cpu = simulated(musa_cases.steps, model, "cpu", str(tmp_path / "cpu"))
    assert on_musa == pytest.approx(on_cpu, rel=1e-3)  # another kernel of AdamW


def test_simulated_tied_embeddings_are_tied_on_the_device(tmp_path: Path) -> None:
    assert simulated(musa_cases.ties, str(folder_of(tiny_qwen3(), tmp_path / "model"))) is True


def test_simulated_a_snapshot_lies_on_the_device_and_has_its_bits() -> None:
    simulated(musa_cases.snapshot_on_the_device)


# ---------------------------------------------------------------- versions of the weights
class Engines:
    """Rollout daemons, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, []

    def start(self, replica: int, **how: Any) -> None:
        arguments = (str(self.folder), replica)
        process = CONTEXT.Process(target=musa_cases.engine, args=arguments, kwargs=how, daemon=True)
        process.start()
        self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    musa_cases.skip_unless_simulated()
    folder_of(tiny_qwen3(), tmp_path / "model")
    _tokenizer(tmp_path / "model")
    made = Engines(tmp_path)
    try:
        yield made
    finally:
        made.close()


def _tokenizer(folder: Path) -> None:
    from engine.tasks import get_task, tiny

    tiny.build_tokenizer(get_task("guess")).save_pretrained(folder)


def test_simulated_versions_go_from_the_device_to_two_engines_by_mccl(
    engines: Engines, tmp_path: Path
) -> None:
    engines.start(0)
    engines.start(1)
    told = simulated(musa_cases.publishing, str(tmp_path), [0, 1])
    both = ["rollout-0", "rollout-1"]
    assert told["sent"] == [None, (2, both, "", []), (3, both, "", [])]  # nobody was there for the first
    assert told["backends"] == ["cpu:gloo,musa:mccl"]
    assert told["broadcasts"] == 2  # each version is one bucket
    right = {each.version: each for each in _ready(tmp_path, {("rollout-0", 3), ("rollout-1", 3)})}
    assert {each.backend for each in _events(tmp_path, TransferGroupFormed)} == {"mccl"}
    assert right[3].digest


def test_simulated_an_engine_that_dies_in_a_broadcast_holds_up_nobody(
    engines: Engines, tmp_path: Path
) -> None:
    engines.start(0)
    engines.start(1, dies_at=2)
    told = simulated(musa_cases.publishing, str(tmp_path), [0, 1])
    first, second, third = told["sent"]
    assert (
        first is None and second[:2] == (2, ["rollout-0", "rollout-1"]) and second[2]
    )  # it failed, and says why
    assert second[3] == ["rollout-1"] and third == (3, ["rollout-0"], "", [])
    _ready(tmp_path, {("rollout-0", 2), ("rollout-0", 3)})
    assert _events(tmp_path, TransferGroupEnded)[0].lost == ["rollout-1"]


def _ready(folder: Path, wanted: set[tuple[str, int]]) -> list[EngineReady]:
    """What engines said of these versions, when all have: each held then what was published, bit for bit."""
    end = time.monotonic() + LONGEST_S
    while True:
        found = _events(folder, EngineReady)
        if wanted <= {(each.engine, each.version) for each in found}:
            break
        assert time.monotonic() < end, f"not ready: {wanted - {(e.engine, e.version) for e in found}}"
        time.sleep(0.05)
    for each in found:
        assert each.checksum == each.digest, f"{each.engine} holds something else at version {each.version}"
    assert {each.transport for each in found if each.version == 3} == {"distributed"}
    return found


def _events(folder: Path, kind: type) -> list[Any]:
    log = open_log(f"file://{folder}/log")
    try:
        return [each for each in fleet(log) if isinstance(each, kind)]
    finally:
        log.close()


# ---------------------------------------------------------------- a whole run
@pytest.mark.timeout(600)
def test_simulated_a_run_trains_on_the_device_and_is_whole(tmp_path: Path) -> None:
    musa_cases.skip_unless_simulated()
    config = musa_cases.run_on_musa(tmp_path / "run")
    processes = [
        CONTEXT.Process(target=target, args=(config.run.dir, *role), daemon=True)
        for target, *role in (
            *((serve_role, role, 0, 1) for role in ("feeder", "reward", "collector")),
            (musa_cases.serve_on_musa, "trainer", 0, 1),
            *((musa_cases.serve_on_musa, "rollout", replica, 2) for replica in (0, 1)),
        )
    ]
    log, topics = open_log(config.log.url), topics_of(config)
    topics.create(log)
    # no step before both engines are there, so that versions after the first are broadcast
    put(log, topics, "ledger", Paused(by="test"))
    try:
        for process in processes:
            process.start()
        eventually(lambda: _both_hold_a_version(log, topics), "both engines to hold version 0", 240)
        put(log, topics, "ledger", Resumed(by="test"))
        for process in processes:
            process.join(240)
            assert process.exitcode == 0, process
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
    ready = [each for each in events(log, topics, "fleet") if isinstance(each, EngineReady)]
    joined = [each for each in events(log, topics, "fleet") if isinstance(each, EngineJoined)]
    log.close()
    assert {each.device for each in joined} == {"musa"}
    assert "distributed" in {each.transport for each in ready}
    assert main(["verify", config.run.dir]) == 0


def _both_hold_a_version(log: EventLog, topics: Topics) -> bool:
    return {each.engine for each in events(log, topics, "fleet") if isinstance(each, EngineReady)} == {
        "rollout-0",
        "rollout-1",
    }


# ---------------------------------------------------------------- torchada
def test_simulated_torchada_over_a_stub_of_torch_musa_takes_the_same_groups() -> None:
    pytest.importorskip("torchada", reason="the package torchada is not installed (extra dev)")
    told = simulated(musa_cases.torchada_over_the_device)
    assert told == {
        "device": "musa:0",
        "backend": "mccl",
        "config": "cpu:gloo,musa:mccl",
        "named": "Musa('musa:0')",
    }


# ---------------------------------------------------------------- settings
def test_on_musa_the_trainer_is_fsdp2_unless_another_is_written() -> None:
    assert build_config(TABLE).trainer.backend == "fsdp2"
    assert build_config({**TABLE, "trainer": {"backend": "torch"}}).trainer.backend == "torch"
    assert build_config({**TABLE, "model": {"path": "m", "device": "cuda"}}).trainer.backend == "torch"
    assert build_config(TABLE, ["model.device=cpu"]).trainer.backend == "torch"
    assert build_config({**TABLE, "model": {"path": "m"}}, ["model.device=musa:1"]).trainer.backend == "fsdp2"
    assert Config().trainer.backend == "torch" and fingerprint(Config()) == fingerprint(Config())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": {"transport": "ipc"}}, 'weights.transport = "ipc" with model.device = "musa"'),
        (
            {"weights": {"transport": "distributed", "backend": "nccl"}},
            r'weights\.backend = "nccl" with model\.device = "musa".*set "auto" \(mccl\)',
        ),
        (
            {
                "weights": {"transport": "distributed", "backend": "mccl"},
                "model": {"path": "m", "device": "cuda"},
            },
            r'weights\.backend = "mccl" with model\.device = "cuda".*set "auto" \(nccl\)',
        ),
    ],
)
def test_what_cannot_work_on_musa_is_refused_with_what_to_set_instead(change: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config({**TABLE, **change})


@pytest.mark.parametrize("page", ["musa.md", "musa.zh-CN.md"])
def test_the_configuration_in_the_docs_can_be_used(page: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    (tmp_path / "run.toml").write_text(text.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    config = load_config(tmp_path / "run.toml", environ={})
    assert (config.model.device, config.trainer.backend, config.trainer.n_ranks) == ("musa", "fsdp2", 4)


def test_gloo_through_main_memory_is_allowed_on_musa() -> None:
    weights = {"transport": "distributed", "backend": "gloo"}
    assert build_config({**TABLE, "weights": weights}).weights.backend == "gloo"


def test_a_run_on_megatron_without_the_vendors_patch_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MUSA_TITAN_PATH", "MUSA_PATCH_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "x").write_text("")
    table = {
        **TABLE,
        "data": {"path": str(tmp_path / "x")},
        "model": {"path": str(tmp_path / "m"), "device": "musa"},
        "trainer": {"backend": "megatron"},
    }
    config = build_config(table)  # a log can be read on a machine without it
    with pytest.raises(ConfigError, match=r"set MUSA_TITAN_PATH .* or MUSA_PATCH_PATH"):
        check_paths(config)
    monkeypatch.setenv("MUSA_PATCH_PATH", str(tmp_path))
    check_paths(config)


def test_an_sglang_server_on_musa_is_told_its_device(tmp_path: Path) -> None:
    line = command("m", python=sys.executable, device="musa", host="h", port=1, args=("--base-gpu-id", "1"))
    assert line[line.index("--device") + 1] == "musa" and line[-2:] == ["--base-gpu-id", "1"]
    assert "--attention-backend" not in line and "--device" not in command(
        "m", python=sys.executable, device="cuda", host="h", port=1, args=()
    )


def test_all_sides_of_a_weight_group_are_told_the_same_backend() -> None:
    assert [group_backend(each) for each in ("gloo", "nccl", "mccl")] == [
        "gloo",
        "nccl",
        "cpu:gloo,musa:mccl",
    ]
