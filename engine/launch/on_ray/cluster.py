"""Asking a Ray cluster: connecting (here alone), what its nodes have, which actors a job has."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.launch.on_ray.placement import Node
from streams.errors import ConfigError, MillstreamError

logger = logging.getLogger(__name__)

NAMESPACE = "millstream"
AUTO, LOCAL = "auto", "local"
_REACH_S = 10.0


class PlacementFailed(MillstreamError):
    """The cluster did not give what the run needs; nothing was left reserved."""


def load_ray() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    # Of what Ray will do about masks of actors without GPUs in future: said now, it warns of nothing.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"--launcher ray needs Ray ({error}); install it on every node: pip install 'millstream[ray]'"
        ) from error
    return ray


def connect(address: str, *, local_cpus: float = 0.0, local_gpus: float = 0.0) -> tuple[Any, bool]:
    """(the module, whether this call has connected it). A driver that is connected already stays as it is.

    Args:
        address: HOST:PORT of the head node; `auto`: the cluster that this machine is part of, or RAY_ADDRESS;
            `local`: one of this process alone, with the given CPUs and GPUs.

    Raises ConfigError when there is no cluster.
    """
    ray = load_ray()
    if ray.is_initialized():
        return ray, False
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS", AUTO)
    if "://" in address:
        raise ConfigError(
            f"--address {address}: the supervisor is a driver of the cluster, not a remote client of it; run this "
            "command on one of the cluster's nodes, with --address auto"
        )
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options |= {"num_cpus": local_cpus, "num_gpus": local_gpus, "include_dashboard": False}
    elif address != AUTO:
        _check_reachable(address)
    try:
        with _own_signal_handlers():
            ray.init(namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r} ({str(error).strip().splitlines()[0]}); start one with ray start --head on "
            "one node and ray start --address=HEAD:6379 on the others, or have one on this machine alone with "
            "--address local"
        ) from error
    return ray, True


def nodes(ray: Any) -> list[Node]:
    """The live ones."""
    free = ray._private.state.available_resources_per_node()
    return [
        Node(each["NodeManagerHostname"], each["Resources"], free.get(each["NodeID"], {}))
        for each in ray.nodes()
        if each["Alive"]
    ]


def is_alive(ray: Any, node: str) -> bool:
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def actors_of(ray: Any, job: str) -> list[Any]:
    """Handles of all hosts of a job that Ray knows, dead ones perhaps among them."""
    found: list[Any] = []
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE and each["name"].startswith(f"{job}/"):
            try:
                found.append(ray.get_actor(each["name"], namespace=NAMESPACE))
            except ValueError:  # it has ended since
                pass
    return found


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except ValueError as error:
        raise ConfigError(f"--address {address}: must be HOST:PORT, auto or local") from error
    except OSError as error:
        raise ConfigError(
            f"--address {address}: nothing answers there within {_REACH_S:.0f} s ({error}); it is where ray start "
            "--head listens, port 6379 unless told otherwise"
        ) from error


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself, to exit at once; ours ends the daemons first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
