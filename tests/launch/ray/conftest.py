"""A cluster for each module of this folder, which are one worker's (tests/support/parallel.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ray_cluster import Nodes, require_ray


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head node of 8 CPUs and 2 pretended GPUs; this process is a driver of it."""
    require_ray()
    # the node's own mask, as a container would have it
    cluster = Nodes({"MUSA_VISIBLE_DEVICES": "4,6"}, num_cpus=8, num_gpus=2)
    try:
        cluster.connect()
        yield cluster
    finally:
        cluster.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray leaves sockets and processes to the garbage collector."""
    for item in items:
        if "/launch/ray/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
