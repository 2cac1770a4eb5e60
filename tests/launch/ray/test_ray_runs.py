"""Whole runs on simulated nodes of one machine: real daemons, the embedded log, `millstream verify` at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.commands import rundir
from engine.config import Config
from engine.launch.local import daemons_of
from engine.launch.on_ray.launcher import RayLauncher
from engine.launch.supervisor import Outcome
from engine.roles import open_run_log, topics_of
from replay.ledger import RunView, read_run
from replay.verify import verify
from tests.faults import harness
from tests.support.ray_cluster import ROOT, Nodes, the_ray

DEADLINE_S = 270.0  # seconds of work; on a machine with much else to do, starting a Ray worker takes long

pytestmark = pytest.mark.timeout(300)


def configuration(folder: Path, steps: int, log_url: str = "", **changes: dict[str, Any]) -> Config:
    """Scripted answers, the trainer of one number: seconds of work, and everything between is the real thing."""
    sections = {
        "run": {"steps": steps, "name": folder.name[:40].strip("._-")},
        "rollout": {"replicas": 1, "options": {"policy": "coin", "heads": "yes", "tails": "no"}},
        "reward": {"replicas": 1, "workers": 0},
        "placement": {"start_timeout_s": 240, "num_cpus": 1},
        "supervisor": {"max_restarts": 10},
    }
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    config = harness.configuration(folder, log_url, **sections)
    rundir.adopt(config)
    return config


def watch(launcher: RayLauncher, during: Callable[[float], None] = lambda elapsed: None) -> Outcome:
    began = time.monotonic()
    try:
        launcher.start()
        while (outcome := launcher.poll()) is None:
            elapsed = time.monotonic() - began
            assert elapsed < DEADLINE_S, f"the run has not ended; logs in {launcher.run_dir}/logs"
            during(elapsed)
            time.sleep(0.05)
        return outcome
    finally:
        launcher.close()


def audited(config: Config) -> RunView:
    with open_run_log(config, readonly=True) as log:
        report = verify(log, topics_of(config))
        assert report.holds, report.as_table()
        return read_run(log, topics_of(config))


def newest_version(config: Config) -> int:
    names = (path.stem for path in (Path(config.run.dir) / "weights").glob("e*-v*.safetensors"))
    return max((int(name.rsplit("-v", 1)[1].split("-")[0]) for name in names), default=-1)


def children_of(words: str) -> list[int]:
    """Processes with this in their command line."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if words.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_goes_on_when_one_of_its_nodes_is_lost(nodes: Nodes, tmp_path: Path):
    node = nodes.add(num_cpus=4, resources={"other": 1})
    # too large for what is left of the first node: some daemons must be on the second
    config = configuration(tmp_path, 60, placement={"num_cpus": 2})
    launcher = RayLauncher(config, daemons_of(config))
    lost: list[str] = []

    def kill(elapsed: float) -> None:
        if not lost and newest_version(config) >= 5:
            hosts = launcher._place._hosts  # pyright: ignore[reportAttributeAccessIssue]
            lost.extend(host.name for host in hosts.values() if host.about.node == node.node_id)
            pids = [launcher.processes()[name.replace("trainer/", "trainer-")] for name in lost]
            assert pids, "something of the run was there"
            nodes.kill(node)
            nodes.add(num_cpus=4)

    outcome = watch(launcher, kill)
    assert outcome.code == 0, outcome.cause
    assert lost
    for name in lost:
        log = Path(config.run.dir) / "logs" / f"{name.replace('trainer/', 'trainer-')}.log"
        assert log.read_text().count("=== millstream started process") >= 2
    view = audited(config)
    assert view.finished is not None and view.finished.step == 60


def run_command(config: Config, nodes: Nodes, out: Path) -> subprocess.Popen[bytes]:
    """`millstream run`, as a user starts it."""
    with out.open("ab") as file:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "engine.cli", "run", config.run.dir),
                *("--launcher", "ray", "--address", nodes.address, "--plain"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )


@pytest.mark.slow
def test_a_killed_command_is_attached_to_by_the_next_and_ctrl_c_leaves_no_process(
    nodes: Nodes, tmp_path: Path
):
    config = configuration(tmp_path, 100_000)
    out = tmp_path / "out.txt"
    serving = f"engine.cli\0serve\0trainer\0{config.run.dir}"
    first = run_command(config, nodes, out)
    second: subprocess.Popen[bytes] | None = None
    try:
        until(lambda: first.poll() is not None or newest_version(config) >= 2, "two steps")
        assert first.poll() is None, out.read_text()
        trainer = children_of(serving)
        first.kill()
        first.wait(DEADLINE_S)
        before = newest_version(config)
        second = run_command(config, nodes, out)
        until(lambda: "is running already" in out.read_text() or second.poll() is not None, "the attachment")
        until(lambda: newest_version(config) > before + 1, "the run to go on")
        assert children_of(serving) == trainer, "not started again"
        second.send_signal(signal.SIGINT)
        assert second.wait(DEADLINE_S) == 130, out.read_text()
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    assert not children_of(config.run.dir), "daemons are left"
    until(lambda: _free(nodes) == 8, "what was reserved to be free")
    audited(config)


def _free(nodes: Nodes) -> float:
    ray = the_ray()

    node = next(each for each in ray.nodes() if each["Alive"] and each["Resources"].get("GPU"))
    return ray._private.state.available_resources_per_node()[node["NodeID"]].get("CPU", 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_kafka(nodes: Nodes, tmp_path: Path, kafka: str, prefix: str):
    config = configuration(tmp_path, 10, f"kafka://{kafka}/{prefix}")
    outcome = watch(RayLauncher(config, daemons_of(config)))
    assert outcome.code == 0, outcome.cause
    view = audited(config)
    assert view.finished is not None and view.finished.step == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_on_a_cluster(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    from engine.demo import demo_config, prepare
    from engine.tasks import get_task

    monkeypatch.setitem(globals(), "DEADLINE_S", 800.0)
    task = get_task("reverse")
    config = demo_config(task, tmp_path / "run", max_steps=6)
    rundir.make_run_dir(Path(config.run.dir))
    prepare(config, task)
    rundir.adopt(config)
    outcome = watch(RayLauncher(config, daemons_of(config)))
    assert outcome.code == 0, outcome.cause
    view = audited(config)
    assert view.finished is not None and view.finished.step == 6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_with_ranks_on_two_nodes_is_started_again_as_a_whole(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    from engine.demo import demo_config, prepare
    from engine.tasks import get_task

    monkeypatch.setitem(globals(), "DEADLINE_S", 800.0)
    task = get_task("reverse")
    overrides = ["trainer.backend=fsdp2", "trainer.n_ranks=2", "placement.actor_num_nodes=2"]
    config = demo_config(task, tmp_path / "run", max_steps=6, overrides=overrides)
    rundir.make_run_dir(Path(config.run.dir))
    prepare(config, task)
    rundir.adopt(config)
    launcher = RayLauncher(config, daemons_of(config))
    killed: list[int] = []

    def kill(elapsed: float) -> None:
        if not killed and newest_version(config) >= 2:
            words = f"engine.cli\0serve\0trainer\0{config.run.dir}"
            killed.extend(pid for pid in children_of(words) if pid != launcher.processes()["trainer-0"])
            os.kill(killed[0], signal.SIGKILL)

    outcome = watch(launcher, kill)
    assert outcome.code == 0, outcome.cause
    assert len(killed) == 1, "one follower, on a bundle of its own"
    view = audited(config)
    assert view.finished is not None and view.finished.step == 6
    assert len(view.epochs) == 2
