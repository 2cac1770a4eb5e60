"""Doctor sees the nodes of a Ray cluster: two simulated ones on this machine, the first with two pretended GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.doctor import others, ray_workers
from engine.doctor.result import Request
from engine.settings import Config, RewardConfig, RunConfig

ray_cluster = pytest.importorskip("tests.support.ray_cluster")
ray_cluster.require_ray()

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    nodes = ray_cluster.Nodes({}, num_cpus=1, num_gpus=2)
    try:
        nodes.add(num_cpus=1)
        yield nodes.address
    finally:
        nodes.close()


def test_workers_and_nodes_of_a_cluster_are_seen_and_agree(address: str, tmp_path: Path) -> None:
    config = Config(run=RunConfig(dir=str(tmp_path)), reward=RewardConfig(function="exact"))
    request = Request(config=config, has_config=True, address=address)
    workers = ray_workers.probe(request)
    assert workers.status == "pass", workers
    assert (
        "3 workers on 2 nodes: the environment arrives, each with a device of its own (2)" in workers.evidence
    )
    ports = others.ports(request)
    assert ports.status == "pass" and "2 connections between 2 nodes" in ports.evidence, ports
    of_ray = others.ray_ports(request)  # node and object manager of each, and the head's GCS
    assert of_ray.status == "pass" and "5 connections to Ray's own ports on 2 nodes" in of_ray.evidence, (
        of_ray
    )
    shared = others.shared_folders(request)
    assert shared.status == "pass" and "2 nodes see one another's files" in shared.evidence, shared
    assert list(tmp_path.iterdir()) == []
