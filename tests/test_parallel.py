"""What runs beside what when the suite is shared out among workers (tests/support/parallel.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("xdist")

from tests.support.parallel import scope_of


def test_a_file_is_one_workers() -> None:
    of_one = {"tests/streams/test_codec.py::test_a", "tests/streams/test_codec.py::test_b[x::y]"}
    assert {scope_of(each) for each in of_one} == {"tests/streams/test_codec.py"}
    assert scope_of("tests/streams/test_log.py::test_a") != scope_of("tests/streams/test_codec.py::test_a")


def test_files_that_may_need_an_sglang_server_are_all_one_workers() -> None:
    names = ("tests/engine/sglang/test_client.py", "tests/engine/sglang/test_engine.py")
    names += ("tests/end_to_end/test_sglang_run.py",)
    assert len({scope_of(f"{name}::test_x") for name in names}) == 1


def test_files_that_share_a_ray_cluster_are_all_one_workers() -> None:
    names = ("tests/launch/ray/test_ray_launcher.py", "tests/launch/ray/test_ray_runs.py")
    assert len({scope_of(f"{name}::test_x") for name in names}) == 1
    assert scope_of("tests/launch/test_placement.py::test_x") == "tests/launch/test_placement.py"
