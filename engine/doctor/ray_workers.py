"""(g) Do Ray's workers get the environment, and each its own devices?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.doctor.accelerator import MASKS
from engine.doctor.peers import NoPeer
from engine.doctor.peers_ray import cluster, on_node
from engine.doctor.result import Request, Result, failed, passed, warned

_CANARY = "MILLSTREAM_DOCTOR_CANARY"
_ANSWER_S = 60.0
_HANDED = ("PYTHONPATH", "LD_LIBRARY_PATH", "MUSA_PATCH_PATH", "MUSA_TITAN_PATH", "HF_HUB_OFFLINE")
_PREFIXES = ("NCCL_", "MCCL_", "GLOO_", "TP_SOCKET")
_STOCK = (
    "stock Ray does not set MUSA_VISIBLE_DEVICES; `millstream run --launcher ray` sets it for each daemon itself, "
    "other programs on this cluster must too"
)
_OTHER_MASK = (
    "Ray was started with a mask or a number of GPUs that is not this node's: ray start --num-gpus=N"
)


class Worker(NamedTuple):
    """What one worker saw as it began."""

    node: str
    masks: dict[str, str]  # of MASKS, where set
    ids: list[str]  # the devices that Ray gave it
    has_canary: bool
    missing: list[str]  # variables of the driver that did not arrive
    python: str
    had_torch: bool  # torch was imported before our code ran


def no_ray(request: Request) -> str:
    return "" if request.address else "no Ray address (--address, RAY_ADDRESS)"


class Looking:
    """The actor: tells what it sees, and stays until it is dropped, so that no two share a device by turns."""

    def look(self, handed: dict[str, str]) -> dict[str, Any]:
        import platform
        import sys

        import ray

        return {
            "masks": {name: os.environ[name] for name in MASKS.values() if name in os.environ},
            "ids": [str(each) for each in ray.get_gpu_ids()],
            "has_canary": os.environ.get(_CANARY) == "sings",
            "missing": [name for name, value in handed.items() if os.environ.get(name) != value],
            "python": platform.python_version(),
            "had_torch": "torch" in sys.modules,
        }


def probe(request: Request) -> Result:
    handed = {
        name: value for name, value in os.environ.items() if name in _HANDED or name.startswith(_PREFIXES)
    }
    with cluster(request) as ray:
        free = ray._private.state.available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        try:
            workers = _look(ray, alive, free, handed)
        except (ray.exceptions.RayError, NoPeer) as error:
            return failed(
                f"a worker could not be started: {error}", "see `ray status` and the node's own logs"
            )
        cpus = max(node["Resources"].get("CPU", 0) for node in alive)
    return judge(workers, request.device, len(alive), int(cpus))


def _look(
    ray: Any, alive: Sequence[dict[str, Any]], free: dict[str, dict[str, float]], handed: dict[str, str]
) -> list[Worker]:
    """One actor for each device of each node that is free now; one without a device where there is none."""
    actors = []
    for node in alive:
        n_devices = int(free.get(node["NodeID"], {}).get("GPU", 0))
        for _ in range(max(1, n_devices)):
            options = {
                "num_cpus": 0,
                "num_gpus": 1 if n_devices else 0,
                "scheduling_strategy": on_node(ray, node),
                "runtime_env": {"env_vars": {**handed, _CANARY: "sings"}},
            }
            actors.append((node, ray.remote(Looking).options(**options).remote()))
    answers = ray.get([actor.look.remote(handed) for _, actor in actors], timeout=_ANSWER_S)
    return [
        Worker(node=f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}", **said)
        for (node, _), said in zip(actors, answers, strict=True)
    ]


def judge(workers: Sequence[Worker], device: str, n_nodes: int, cpus: int) -> Result:
    said = f"{len(workers)} workers on {n_nodes} nodes"
    deaf = [worker.node for worker in workers if not worker.has_canary or worker.missing]
    if deaf:
        lost = sorted({name for worker in workers for name in worker.missing} or {_CANARY})
        return failed(
            f"{said}: {', '.join(lost)} did not arrive on {', '.join(sorted(set(deaf)))}",
            "hand it over in runtime_env",
        )
    if any(worker.had_torch for worker in workers):
        return failed(
            f"{said}: torch was imported before the worker's mask was set",
            "no torch in a worker_process_setup_hook",
        )
    pythons = {worker.python for worker in workers}
    if len(pythons) > 1:
        return failed(f"{said}: Python {', '.join(sorted(pythons))}", "the same Python on every node")
    with_devices = [worker for worker in workers if worker.ids]
    if with_devices and (wrong := _shared(with_devices, MASKS.get(device, MASKS["cuda"]))):
        if device == "musa" and "two workers" not in wrong:
            return warned(f"{said}: {wrong}", _STOCK)
        return failed(f"{said}: {wrong}", _OTHER_MASK)
    if cpus > 32:
        return warned(
            f"{said}: a node has {cpus} CPUs for Ray, which starts as many workers ahead",
            "ray start --num-cpus=8, and OMP_NUM_THREADS=1: a container's limit of processes is soon met",
        )
    devices = f", each with a device of its own ({len(with_devices)})" if with_devices else ", no devices"
    return passed(f"{said}: the environment arrives{devices}; Python {pythons.pop()}")


def _shared(workers: Sequence[Worker], mask: str) -> str:
    """Which two could use one device; ""."""
    taken: dict[tuple[str, str], str] = {}
    for worker in workers:
        shown = worker.masks.get(mask)
        if shown is None:
            return f"{mask} is not set in a worker with device {','.join(worker.ids)} on {worker.node}"
        if shown.split(",") != worker.ids:
            return f"{mask}={shown} in a worker that Ray gave device {','.join(worker.ids)} on {worker.node}"
        for each in worker.ids:
            if (worker.node, each) in taken:
                return f"two workers on {worker.node} have device {each}"
            taken[worker.node, each] = shown
    return ""
