"""Ray clusters of several simulated nodes on this machine, for the tests in tests/launch/ray.

A node is a raylet of its own (`ray.cluster_utils.Cluster`), with as many CPUs and GPUs as it is said to have: Ray
counts them, nobody looks whether they are there. All nodes are on a loopback address.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.2"  # loopback, but not one of the names that Ray replaces by the machine's own address
QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # a lost node is noticed within seconds
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
_HERE = importlib.util.find_spec("ray") is not None


def require_ray() -> None:
    """Skip a module's tests without Ray, which is an extra; where MILLSTREAM_REQUIRE_RAY is set, fail."""
    if not _HERE and not os.environ.get("MILLSTREAM_REQUIRE_RAY"):
        pytest.skip("Ray is not installed (pip install 'millstream[ray]')", allow_module_level=True)


def the_ray() -> Any:
    """The module, untyped: what is used of it is more than it declares."""
    return importlib.import_module("ray")


class Nodes:
    """One cluster. `address` is its head's; `add` a node, `kill` it as a power failure would."""

    def __init__(self, environ: Mapping[str, str], **head: Any) -> None:
        """`environ`: what every node has besides; it is this process's too until `close`."""
        self._environ = dict(os.environ)
        # what a node's Ray has when it starts is what its workers have: Millstream is "installed" there by PYTHONPATH
        os.environ.update(QUIET | {"PYTHONPATH": str(ROOT)} | dict(environ))
        from ray.cluster_utils import Cluster

        _do_not_wait_for_dashboards()
        self._cluster = Cluster(initialize_head=True, head_node_args={**_ports(), **head})
        self.address = str(self._cluster.address)

    def connect(self) -> Any:
        """Make this process a driver, as `millstream run` is one."""
        from engine.launch.on_ray import cluster

        return cluster.connect(self.address)[0]

    def add(self, **resources: Any) -> Any:
        return self._cluster.add_node(**_ports(), **resources)

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        the_ray().shutdown()
        self._cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._environ)


def _ports() -> dict[str, Any]:
    """Chosen here: a raylet that is to choose its agents' ports waits for these, and gives up on a busy machine."""
    sockets = [socket.create_server((ADDRESS, 0)) for _ in range(4)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    names = (
        "metrics_agent_port",
        "dashboard_agent_listen_port",
        "runtime_env_agent_port",
        "metrics_export_port",
    )
    return {
        **dict(zip(names, ports, strict=True)),
        "include_dashboard": False,
        "include_log_monitor": False,
        "node_ip_address": ADDRESS,
        "object_store_memory": 80 << 20,
    }


def _do_not_wait_for_dashboards() -> None:
    """A raylet waits 15 s for its dashboard agent to say that it has no port, and dies; it is told so beforehand."""
    from ray._private.node import Node

    raylet: Any = importlib.import_module("ray._raylet")
    begin = Node.start_ray_processes
    if getattr(begin, "is_ours", False):
        return

    def start(self: Any) -> None:
        name = raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME
        raylet.persist_port(self._session_dir, self._node_id, name, -1)
        begin(self)

    start.is_ours = True  # type: ignore[attr-defined]
    Node.start_ray_processes = start  # type: ignore[method-assign]
