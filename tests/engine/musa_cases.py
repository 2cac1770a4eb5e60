"""What tests of the simulated MUSA device do, each in a process of its own (tests/support/fake_musa.py).

test ─► simulated(case, …) ─► a fresh process: install() ─► case(…) ─► its answer, or its traceback
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d

from engine import devices
from engine.config import CONFIG_FILE, Config, dump_toml, load_config
from engine.interfaces import Sampling
from engine.rollout.batched import BatchedEngine
from engine.rollout.loading import on_disk
from engine.rollout.worker import RolloutWorker
from engine.trainer import ranks
from engine.trainer.torch_backend import TorchBackend
from engine.trainer.torch_settings import TorchSettings
from engine.weights import collective
from engine.weights.snapshots import DeviceSnapshot, Snapshots, digest
from engine.weights.store import digest as digest_of
from engine.weights.tensors import digest_raw
from streams.open import open_log
from streams.topics import ALL_TOPICS
from tests.engine.trainer_support import batch_of
from tests.engine.transfer_daemons import (
    PARTITIONS,
    TOPICS,
    Fault,
    TestTrainer,
    _at_bucket,
    _candidates,
    _set_up,
    eventually,
    serve_role,
    tiny_run,
)
from tests.support import fake_musa

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.engine.musa_cases"])
LONGEST_S = 100.0
MUSA = "musa:0"


def simulated(case: Callable[..., Any], *arguments: Any) -> Any:
    """The case's answer. AssertionError, with what it said, when it fails or does not end."""
    skip_unless_simulated()
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=(there, case, arguments), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(LONGEST_S), f"{case.__name__}: no answer within {LONGEST_S:g} s"
        is_right, answer = here.recv()
    except EOFError:
        process.join(5)
        raise AssertionError(f"{case.__name__}: ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join(10)
    assert is_right, f"{case.__name__}:\n{answer}"
    return answer


def skip_unless_simulated() -> None:
    if not fake_musa.CAN_BE_INSTALLED:
        pytest.skip(
            f"torch {torch.__version__} takes no backend written in Python, so MCCL cannot be simulated"
        )


def _run(pipe: Any, case: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        fake_musa.install()
        pipe.send((True, case(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


# ---------------------------------------------------------------- the device
def answers() -> dict[str, Any]:
    """What the object says of the simulated device."""
    device = devices.ready("musa:1")
    device.use()
    device.synchronize()
    memory = device.memory()
    return {
        "torch": str(device.torch),
        "current": fake_musa.MODULE.current_device(),
        "calls": fake_musa.MODULE.calls,
        "memory": tuple(memory),
        "hardware": device.hardware(),
        "identity": device.identity(),
        "last": device.at(0, "model.device").name,
    }


def generators() -> None:
    device = devices.ready(MUSA)
    device.seed(7)
    state = device.rng_state()
    drawn = torch.rand(4, device=MUSA).cpu(), torch.rand(4)
    assert set(state) == {"cpu", "device"} and not torch.equal(*drawn)
    torch.rand(3, device=MUSA)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=MUSA).cpu(), drawn[0]) and torch.equal(torch.rand(4), drawn[1])


def no_such_rank() -> str:
    try:
        ranks.device_of("musa:1", 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ---------------------------------------------------------------- groups
def a_trainers_group(rank: int, folder: str) -> dict[str, Any]:
    """One of two ranks: tensors on musa go by MCCL, those in main memory by Gloo."""
    store = fake_musa.c10d.FileStore(f"{folder}/store", 2)
    processes = ranks.ProcessGroup(rank, 2, ranks.device_of("musa", rank), store)
    told = torch.full((3,), float(rank + 1), device=MUSA)
    dist.broadcast(told, 0)
    torch.musa.current_stream().synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    on_host = torch.full((3,), float(rank + 1))
    dist.broadcast(on_host, 0)
    gathered = processes.gather([rank + 0.5]).tolist()
    answer = {
        "backend": dist.get_backend(),
        "current": fake_musa.MODULE.current_device(),
        "on musa": told.cpu().tolist(),
        "on host": on_host.tolist(),
        "gathered": gathered,
        "mccl": [each for each in fake_musa.Mccl.calls if each != "shutdown"],
    }
    processes.close()
    return answer


def refused_on_the_cpu() -> str:
    """MCCL itself, asked for a tensor in main memory."""
    backend = fake_musa.Mccl(fake_musa.c10d.HashStore(), 0, 1, timedelta(seconds=5))
    try:
        backend.broadcast([torch.ones(2)], fake_musa.c10d.BroadcastOptions())
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


# ---------------------------------------------------------------- a trainer
def steps(model: str, device: str, folder: str) -> list[float]:
    """Losses of four steps, and of the last two once more from a checkpoint made between them."""
    backend = _trainer(model, device)
    losses = [backend.step(batch_of(6, seed=number, step=number))["loss"] for number in (1, 2)]
    devices.ready(device).seed(11)  # so that a generator has a state that is not its first
    place = Path(folder)
    place.mkdir()
    backend.snapshot()(place)
    kept = devices.ready(device).rng_state()
    losses += [backend.step(batch_of(6, seed=number, step=number))["loss"] for number in (3, 4)]
    right = digest(backend.weights())

    again = _trainer(model, device)
    devices.ready(device).seed(5)
    again.load(place)
    for name, state in devices.ready(device).rng_state().items():
        assert torch.equal(state, kept[name]), f"the generator of {name} is another"
    repeated = [again.step(batch_of(6, seed=number, step=number))["loss"] for number in (3, 4)]
    assert repeated == losses[2:] and digest(again.weights()) == right
    assert {each.device.type for each in again.weights().values()} == {device.partition(":")[0]}
    return losses


def _trainer(model: str, device: str) -> TorchBackend:
    return TorchBackend(Path(model), TorchSettings(lr=0.01, device=device, threads=1))


def ties(model: str) -> bool:
    """Whether a model with tied embeddings has them tied on the device."""
    held = _trainer(model, MUSA).model
    return held.get_input_embeddings().weight is held.get_output_embeddings().weight


def snapshot_on_the_device() -> None:
    """The copy lies on musa, its digest is that of the same bits in main memory, and host() has these bits."""
    weights = {"a": torch.randn(5, 3), "b": torch.randn(7).to(torch.bfloat16)}
    there = {name: each.to(MUSA) for name, each in weights.items()}
    taken = Snapshots(on_device=True).take(there)
    assert isinstance(taken, DeviceSnapshot) and taken.device == MUSA
    there["a"].zero_()
    assert digest(taken) == digest_of(weights) == digest_raw(taken.host())


# ---------------------------------------------------------------- versions of the weights
class SaysWhatItHolds(BatchedEngine):
    """The real torch engine; its checksum is the digest of the weights that it would serve with now."""

    def checksum(self) -> str:
        held = self._model.model.state_dict()
        return digest_of({name: tensor.cpu() for name, tensor in held.items()})


def engine(folder: str, replica: int, *, dies_at: int = -1) -> None:
    """A rollout daemon whose model lies on musa. Target of a process; `dies_at`: killed in that version's broadcast."""
    fake_musa.install()
    _set_up(folder, f"rollout-{replica}")
    log = open_log(f"file://{folder}/log")
    eventually(
        lambda: set(map(TOPICS.name, ALL_TOPICS)) <= set(log.topics()),
        "the trainer to make the topics",
        LONGEST_S,
    )
    worker = RolloutWorker(
        log,
        TOPICS,
        SaysWhatItHolds(Path(folder) / "model", name=f"rollout-{replica}", device=MUSA),
        lambda *_: None,  # pyright: ignore[reportArgumentType]
        locate=on_disk(Path(folder)),
        sampling=Sampling(max_tokens=1),
        replica=replica,
        replicas=PARTITIONS,
    )
    if dies_at >= 0:
        _die_in(worker, dies_at)
    sys.exit(worker.run(lambda: False))


def _die_in(worker: RolloutWorker, version: int) -> None:
    engine: Any = worker.engine
    receive = engine.receive

    async def dying(published: Any, group: str, bucket_bytes: int) -> float:
        if published.version == version:
            _at_bucket(Fault("kill", bucket=0))
        return await receive(published, group, bucket_bytes)

    engine.receive = dying


def weights_of(version: int, model: str) -> dict[str, Any]:
    """All weights of the model in this folder, other ones for each version."""
    made = TorchBackend(Path(model), TorchSettings(threads=1)).weights()
    return {name: each.detach() + version for name, each in made.items()}


def publishing(folder: str, engines: list[int]) -> dict[str, Any]:
    """The trainer: three versions from the device, to those of these engines that are there."""
    trainer = TestTrainer(Path(folder), backend=devices.named(MUSA).collectives, device=MUSA)
    names = [f"rollout-{each}" for each in engines]
    taking, sent, backends = Snapshots(on_device=True), [], []
    for version in (1, 2, 3):
        if version > 1:
            eventually(lambda names=names: _candidates(trainer) == names, f"{names} to be there", LONGEST_S)
        tensors = {name: each.to(MUSA) for name, each in weights_of(version, f"{folder}/model").items()}
        taken = taking.take(tensors)
        assert isinstance(taken, DeviceSnapshot)
        event = trainer.store.publish(taken, epoch=trainer.epoch, version=version, step=version)
        event = trainer.sender.prepare(event)
        trainer.write("ledger", event)
        trainer.sender.send(event, taken)
        assert trainer.sender.wait(timedelta(seconds=60))
        result = trainer.sender.sent
        sent.append(
            None
            if result is None
            else (result.published.version, result.receivers, result.error, result.lost)
        )
        backends += [str(each) for each in _group_backends() if str(each) not in backends]
        if result is not None:
            names = [name for name in names if name not in result.lost]
    n_broadcasts = fake_musa.Mccl.calls.count("broadcast")
    trainer.close()
    eventually(lambda: "abort" in fake_musa.Mccl.calls, "MCCL's half of the group to be aborted")
    return {"sent": sent, "backends": backends, "broadcasts": n_broadcasts}


def _group_backends() -> list[str]:
    return list(dist.distributed_c10d._world.pg_backend_config.values())


# ---------------------------------------------------------------- torchada
def torchada_over_the_device() -> dict[str, Any]:
    """torchada takes the simulated device for torch_musa's: names of CUDA mean MUSA then, and ours are as before."""
    stub = types.ModuleType("torch_musa")
    stub.__version__, stub.__path__ = torch.__version__.partition("+")[0], []  # pyright: ignore[reportAttributeAccessIssue]
    stub.__spec__ = ModuleSpec("torch_musa", None, is_package=True)
    sys.modules["torch_musa"] = stub
    import torchada  # pyright: ignore[reportMissingImports]

    assert torchada.is_musa_platform()
    made = torch.zeros(2, device="cuda")
    dist.init_process_group("nccl", store=fake_musa.c10d.HashStore(), rank=0, world_size=1)
    backend = dist.get_backend()
    # a weight group of ours in that same process, as in a server's or Megatron's
    listener = collective.Listener("127.0.0.1", 0, 1, timedelta(seconds=20))
    group = collective.join(
        "127.0.0.1", listener.port, 0, 1, "g", "mccl", timedelta(seconds=20), listener=listener, device=MUSA
    )
    config = _group_backends()[-1]
    group.close()
    return {
        "device": str(made.device),
        "backend": backend,
        "config": config,
        "named": repr(devices.ready(MUSA)),
    }


# ---------------------------------------------------------------- a whole run
def run_on_musa(folder: Path) -> Config:
    """tiny_run of tests/engine/transfer_daemons.py, with trainer and engines on the simulated device."""
    overrides = ["model.device=musa", "trainer.backend=torch"]  # FSDP2 cannot be simulated
    config = load_config(tiny_run(folder).run.dir, overrides, environ={})
    (folder / CONFIG_FILE).write_text(dump_toml(config), encoding="utf-8")
    return config


def serve_on_musa(folder: str, role: str, replica: int, replicas: int) -> None:
    """One daemon of the run. Target of a process."""
    fake_musa.install()
    serve_role(folder, role, replica, replicas)
