"""The nodes of a Ray cluster, each by an actor that does the same few operations. Ray is imported in functions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.doctor.operations import Operations, Refused, folders_of, services_of
from engine.doctor.peers import Node, NoPeer
from engine.doctor.result import Request

_HEAD = "node:__internal_head__"  # a resource that Ray gives to the head alone
_ASK_S = 100.0  # the first question waits for the actor's process to start


class Actor:
    """Runs on one node."""

    def __init__(self, folders: dict[str, str], addresses: list[str]) -> None:
        self._operations = Operations(folders, addresses)

    def ask(self, operation: str, arguments: dict[str, Any]) -> Any:
        try:
            return self._operations.ask(operation, **arguments)
        except OSError as error:
            raise Refused(f"{error.strerror or error} ({error.filename or 'socket'})") from None


@contextmanager
def cluster(request: Request) -> Iterator[Any]:
    """Ray, connected. Raises NoPeer."""
    try:
        import ray
    except ImportError:
        raise NoPeer("ray is not installed here (pip install 'millstream[ray]')") from None
    environ = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    try:
        ray.init(
            address=request.address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": environ},
        )
    except Exception as error:  # ray raises many kinds, ConnectionError and RuntimeError among them
        raise NoPeer(f"Ray at {request.address}: {error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def ray_nodes(request: Request) -> Iterator[list[Node]]:
    """One actor on each node that is alive; that of this process first, if it is one of them."""
    with cluster(request) as ray:
        alive = [node for node in ray.nodes() if node["Alive"]]
        mine = ray.get_runtime_context().get_node_id()
        alive.sort(key=lambda node: node["NodeID"] != mine)
        folders = folders_of(request.config.run.dir, request.config.model.path)
        addresses = list(services_of(request.config).values())
        yield [_node(ray, node, folders, addresses) for node in alive]


def on_node(ray: Any, node: dict[str, Any]) -> Any:
    """The scheduling strategy for exactly that node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _ports(ray: Any, node: dict[str, Any]) -> dict[str, int]:
    found = {"node manager": int(node["NodeManagerPort"]), "object manager": int(node["ObjectManagerPort"])}
    if _HEAD in node["Resources"]:
        found["GCS"] = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    return found


def _node(ray: Any, node: dict[str, Any], folders: dict[str, str], addresses: list[str]) -> Node:
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})"
    made = ray.remote(Actor).options(num_cpus=0, scheduling_strategy=on_node(ray, node))
    actor = made.remote(folders, addresses)

    def ask(operation: str, **arguments: Any) -> Any:
        try:
            return ray.get(actor.ask.remote(operation, arguments), timeout=_ASK_S)
        except ray.exceptions.GetTimeoutError:
            raise NoPeer(f"{name}: {operation}: no answer within {_ASK_S:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise NoPeer(f"{name}: {operation}: {error.cause}") from None
        except ray.exceptions.RayError as error:
            raise NoPeer(f"{name}: {operation}: {error}") from None

    return Node(name, node["NodeManagerAddress"], ask, ports=_ports(ray, node))
