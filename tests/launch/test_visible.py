"""Masks of devices: which variables hide them, and the check that they did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.devices import visible
from streams.errors import ConfigError

ROOT = Path(__file__).parents[2]


def checked(environ: dict[str, str], more: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own, since torch may be loaded in this one."""
    code = f"{more}\nimport os\nfrom engine.devices.visible import check\ncheck(os.environ)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False
    )


def test_a_mask_names_every_variable_of_its_kind():
    assert visible.variables_for("cuda", ["1", "2"]) == {
        "CUDA_VISIBLE_DEVICES": "1,2",
        "MILLSTREAM_GIVEN_DEVICES": "cuda:1,2",
    }
    assert visible.variables_for("musa", []) == {
        "MUSA_VISIBLE_DEVICES": "",
        "MTHREADS_VISIBLE_DEVICES": "",
        "MILLSTREAM_GIVEN_DEVICES": "musa:",
    }
    assert visible.variables_for("cpu", []) == {"MILLSTREAM_GIVEN_DEVICES": "cpu:"}


def test_stock_rays_numbers_are_places_in_a_nodes_musa_mask():
    environ = {"MUSA_VISIBLE_DEVICES": "4,6,7"}
    assert visible.ids_on_node("musa", ["2", "0"], environ) == ["7", "4"]
    assert visible.ids_on_node("musa", ["2"], {}) == ["2"]


def test_a_ray_that_knows_musa_has_narrowed_the_mask_to_the_ids_themselves():
    assert visible.ids_on_node("musa", ["6", "7"], {"MUSA_VISIBLE_DEVICES": "6,7"}) == ["6", "7"]


def test_rays_cuda_ids_are_those_of_the_nodes_mask_already():
    assert visible.ids_on_node("cuda", ["6"], {"CUDA_VISIBLE_DEVICES": "4,6"}) == ["6"]
    uuids = {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}
    assert visible.ids_on_node("cuda", ["GPU-bb"], uuids) == ["GPU-bb"]


def test_a_ray_that_counts_more_devices_than_the_mask_has_is_refused():
    with pytest.raises(ConfigError, match=r"lists 1: start Ray there with --num-gpus=1"):
        visible.ids_on_node("musa", ["1"], {"MUSA_VISIBLE_DEVICES": "4"})


def test_a_process_that_sees_what_it_was_given_passes_and_one_without_a_launcher_too():
    assert checked(visible.variables_for("musa", ["3"])).returncode == 0
    assert checked({}).returncode == 0


def test_a_process_that_sees_another_device_than_its_own_is_refused():
    changed = checked({**visible.variables_for("musa", ["3"]), "MUSA_VISIBLE_DEVICES": "0,1,2,3"})
    assert changed.returncode != 0
    assert "MUSA_VISIBLE_DEVICES is '0,1,2,3', and this process was given '3'" in changed.stderr
    unset = checked(
        {"MILLSTREAM_GIVEN_DEVICES": "cuda:3"}, "import os; os.environ.pop('CUDA_VISIBLE_DEVICES', None)"
    )
    assert "CUDA_VISIBLE_DEVICES is not set" in unset.stderr


def test_a_mask_that_came_after_torch_is_refused():
    late = checked(visible.variables_for("cuda", ["3"]), "import sys; sys.modules['torch'] = sys")
    assert "torch was imported before cuda devices '3'" in late.stderr


def test_serve_looks_before_it_does_anything_else(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MILLSTREAM_GIVEN_DEVICES": "musa:1"}
    env |= {"MUSA_VISIBLE_DEVICES": "0", "MTHREADS_VISIBLE_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", "serve", "trainer", str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "MUSA_VISIBLE_DEVICES is '0'" in done.stderr
