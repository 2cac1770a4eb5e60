"""`millstream doctor` as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.doctor.about import about
from engine.doctor.result import failed
from tests.support.sglang import require_sglang

ROOT = Path(__file__).parents[3]
CONFIG = """
[run]
dir = "{dir}"
steps = 5
[data]
path = "{dir}/rows.jsonl"
[rollout]
backend = "{backend}"
[reward]
function = "exact"
[trainer]
backend = "{trainer}"
{more}
"""


def doctor(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    names = ("RAY_ADDRESS", "MUSA_PATCH_PATH", "MUSA_TITAN_PATH")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=110,
        check=False,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
    )


def config(folder: Path, *, backend: str = "scripted", more: str = "") -> str:
    file = folder / "run.toml"
    trainer = "scalar" if backend == "scripted" else "torch"
    file.write_text(CONFIG.format(dir=folder / "run", backend=backend, trainer=trainer, more=more))
    return str(file)


def test_this_machine_without_a_configuration_has_no_failure_and_keeps_no_file(tmp_path: Path) -> None:
    done = doctor("--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["healthy"] is True
    status = {each["probe"]: each["status"] for each in told["probes"]}
    assert (status["log-folder"], status["log-locks"], status["disk"]) == ("pass", "pass", "pass")
    assert (status["broker"], status["ray-workers"], status["model"]) == ("skip", "skip", "skip")
    assert told["about"]["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(tmp_path.iterdir()) == []
    if not told["about"]["hardware"]["accelerators"] or told["about"]["hardware"]["accelerators"] == "none":
        assert status["accelerator"] == "skip"
        assert "no accelerator (cpu)" in done.stdout


def test_musa_asked_for_on_a_machine_without_it_fails_and_its_other_points_are_no_pass(
    tmp_path: Path,
) -> None:
    asked = config(tmp_path, more='[model]\ndevice = "musa"\n')
    done = doctor(asked, "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = {each["probe"]: each for each in json.loads(done.stdout)["probes"]}
    assert found["accelerator"]["status"] == "fail"
    assert "torch_musa" in found["accelerator"]["remedy"]
    for name in ("collectives", "memory-saver"):
        assert (found[name]["status"], found[name]["evidence"]) == (
            "skip",
            "no usable MUSA device: see the probe accelerator",
        )


def test_the_page_to_keep_names_hardware_versions_command_and_results(tmp_path: Path) -> None:
    page = tmp_path / "pages" / "node.md"
    secret = {"NCCL_DEBUG": "INFO", "NCCL_AUTH_TOKEN": "hush"}
    done = doctor("--only", "disk", "--only", "log-sync", "--record", str(page), cwd=tmp_path, **secret)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    for needed in (
        "| processor |",
        "| python |",
        "| os |",
        "`millstream doctor --only disk",
        "| Room on the disk | pass |",
    ):
        assert needed in text
    assert "| NCCL_DEBUG | INFO |" in text
    assert "hush" not in text
    assert done.stdout.count("\n") == 3, "two probes and the totals"


def test_a_failure_ends_with_1_and_stands_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    done = doctor(config(tmp_path), "--only", "log-folder", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL  log-folder")
    assert "→ name a folder that you may write to" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "disc"), "--only disc: no such probe; known: accelerator"),
        (("--peer", "host"), "--peer host: needed HOST:PORT"),
        (("--set", "run.steps=3"), "name one"),
        (("--peer", "a:1", "--address", "auto"), "two ways to see other nodes"),
        (("--serve", "x"), "needed PORT or HOST:PORT"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_needed(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = doctor(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr


def test_nothing_of_the_log_and_network_probes_needs_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported is in the way."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    names = (
        "log-folder",
        "log-sync",
        "log-locks",
        "disk",
        "ports",
        "shared-folders",
        "network-card",
        "node-address",
    )
    only = [word for name in names for word in ("--only", name)]
    done = doctor(*only, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch was imported" not in done.stdout + done.stderr


def test_a_real_sglang_is_read_for_architectures_backends_and_endpoints(tmp_path: Path) -> None:
    python = require_sglang()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    more = f'[model]\npath = "{model}"\n[rollout.sglang]\npython = "{python}"\n'
    asked = config(tmp_path, backend="sglang", more=more)
    done = doctor(asked, "--only", "sglang", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "it has Qwen3ForCausalLM; attention torch_native" in done.stdout
    (model / "config.json").write_text('{"architectures": ["NewestForCausalLM"]}')
    done = doctor(asked, "--only", "sglang", cwd=tmp_path)
    assert done.returncode == 1 and "no architecture NewestForCausalLM" in done.stdout
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    done = doctor(
        asked, "--only", "sglang", "--set", "rollout.sglang.args=['--attention-backend','fa9']", cwd=tmp_path
    )
    assert done.returncode == 1 and "--attention-backend fa9: this sglang has" in done.stdout


def test_the_page_holds_no_value_of_a_setting_and_no_login_of_a_url() -> None:
    told = about(
        [
            "doctor",
            "c.toml",
            "--set",
            "rollout.sglang.env.HF_TOKEN=hf_x",
            "--set=log.url=kafka://u:pw@h",
            "http://u:pw@h",
        ],
        {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "NCCL_DEBUG": "INFO", "SGLANG_API_KEY": "k"},
    )
    assert (
        told["command"]
        == "doctor c.toml --set rollout.sglang.env.HF_TOKEN=… --set=log.url=… http://<redacted>@h"
    )
    assert told["variables"] == {"NCCL_DEBUG": "INFO"}
    assert "pw" not in failed("http://u:pw@h: refused", "").evidence
