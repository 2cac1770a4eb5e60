"""The Ray launcher over a real Ray with pretended GPUs; each daemon is a small script that does what its test says."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, build_config
from engine.launch.daemon import DaemonSpec
from engine.launch.local import LocalLauncher
from engine.launch.on_ray.cluster import PlacementFailed
from engine.launch.on_ray.launcher import RayLauncher
from engine.launch.supervisor import Outcome
from streams.errors import ConfigError
from tests.support.ray_cluster import Nodes, the_ray

DEADLINE_S = 100.0  # as on a machine with much else to do, where starting a Ray worker takes long
pytestmark = pytest.mark.timeout(300)
MUSA = ("MUSA_VISIBLE_DEVICES", "MTHREADS_VISIBLE_DEVICES")

# `daemon.py NAME BEHAVIOUR FOLDER --with-parent PID`: writes NAME.up.<pid>, then behaves.
DAEMON = """
import json, os, pathlib, signal, sys, time
name, behaviour, folder, parent = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[-1])
from engine.launch.child import die_with_parent
if "RANK" in os.environ:
    name += ".rank" + os.environ["RANK"]

def ended(*_):
    (folder / f"{name}.stopped").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, ended)
die_with_parent(parent)
first = not list(folder.glob(f"{name}.up.*"))
(folder / f"{name}.up.{os.getpid()}").write_text(json.dumps(dict(os.environ)))
if behaviour == "crash":
    raise RuntimeError(f"{name} has no data")
if behaviour == "wrong config":
    sys.exit(2)
if behaviour == "rank 1 is killed, once" and first and name.endswith("rank1"):
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "rank 1 is killed, once" and first:  # as a rank 0 that has lost a follower
    while not list(folder.glob("trainer-0.rank1.up.*")):
        time.sleep(0.02)
    print("rank 1 is lost", flush=True)
    sys.exit(1)
if behaviour == "finish":
    (folder / "finished").touch()
    sys.exit(0)
while not (folder / "finished").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "daemon.py").write_text(DAEMON)
    return tmp_path


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    table: dict[str, dict[str, Any]] = {
        "run": {"name": folder.name[:40].strip("._-"), "dir": str(folder / "run")},
        "data": {"path": "prompts.jsonl"},
        "reward": {"function": "exact"},
        "rollout": {"backend": "scripted"},
        "trainer": {"backend": "scalar"},
    }
    for section, values in sections.items():
        table.setdefault(section, {}).update(values)
    table.setdefault("placement", {}).setdefault("start_timeout_s", 60)
    return build_config(table)


def launcher_of(
    folder: Path,
    behaviours: dict[str, str],
    environ: dict[str, str] | None = None,
    **sections: dict[str, Any],
) -> RayLauncher:
    config = config_of(folder, **sections)

    def command(spec: DaemonSpec) -> list[str]:
        return [str(folder / "daemon.py"), spec.name, behaviours[spec.role], str(folder)]

    replicas = {"rollout": config.rollout.replicas}
    return RayLauncher(
        config,
        [
            DaemonSpec(role, replica, replicas.get(role, 1))
            for role in behaviours
            for replica in range(replicas.get(role, 1))
        ],
        command=command,
        finished=(folder / "finished").exists,
        environ={**os.environ, **(environ or {})},
    )


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.05)


def run(launcher: RayLauncher, stop: Callable[[], object] = lambda: False) -> Outcome:
    deadline = time.monotonic() + DEADLINE_S
    outcome = launcher.run(lambda: bool(stop()) or time.monotonic() > deadline)
    assert time.monotonic() < deadline, "the run did not end by itself"
    return outcome


def environments(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.up.*"))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gpus_are_free(nodes: Nodes, count: float = 2) -> None:
    ray = the_ray()

    until(lambda: ray.available_resources().get("GPU") == count, f"{count} free GPUs")


def test_o31_resources_never_come(nodes: Nodes, folder: Path):
    began = time.monotonic()
    launcher = launcher_of(
        folder,
        {"rollout": "work", "trainer": "work"},
        model={"device": "musa"},
        rollout={"replicas": 3, "backend": "scripted"},
        placement={"rollout_num_gpus": 3, "start_timeout_s": 3},
    )
    with pytest.raises(PlacementFailed, match="GPU: needs 3, has 2, 1 pending"):
        launcher.run(lambda: False)
    assert time.monotonic() - began < 30
    assert not list(folder.glob("*.up.*")), "nothing was started"
    gpus_are_free(nodes)


def test_each_engine_sees_its_own_musa_device_where_stock_ray_shows_both_to_both(
    nodes: Nodes, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    ray = the_ray()

    @ray.remote(num_gpus=1, num_cpus=0)
    class Stock:
        def masks(self) -> tuple[str, str]:
            return os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("MUSA_VISIBLE_DEVICES", "")

    stock = [Stock.remote() for _ in range(2)]
    masks = ray.get([each.masks.remote() for each in stock], timeout=DEADLINE_S)
    for each in stock:
        ray.kill(each)
    assert {cuda for cuda, _ in masks} == {"0", "1"}
    assert [musa for _, musa in masks] == ["4,6", "4,6"], "the bug: each would use both"
    gpus_are_free(nodes)

    launcher = launcher_of(
        folder,
        {"rollout": "work", "trainer": "finish"},
        model={"device": "musa"},
        rollout={"replicas": 2, "backend": "scripted"},
        placement={"rollout_num_gpus": 2},
    )
    launcher.start()
    try:
        until(
            lambda: launcher.poll() is not None and len(list(folder.glob("rollout-*.up.*"))) == 2, "the end"
        )
    finally:
        launcher.close()
    engines = [environments(folder, f"rollout-{at}")[0] for at in range(2)]
    for name in MUSA:
        assert {engine[name] for engine in engines} == {"4", "6"}, "the node's own mask is 4,6"
    trainer = environments(folder, "trainer-0")[0]
    assert [trainer[name] for name in MUSA] == ["", ""], "it was given none"
    gpus_are_free(nodes)


def test_a_daemon_that_keeps_dying_fails_the_run_within_its_budget_and_with_its_cause(
    nodes: Nodes, folder: Path
):
    launcher = launcher_of(folder, {"feeder": "crash", "trainer": "work"}, supervisor={"max_restarts": 1})
    outcome = run(launcher)
    assert outcome.code == 1
    first, *_, last, after = outcome.cause.splitlines()
    assert first == f"feeder-0 ended: exit code 1: {folder / 'run' / 'logs' / 'feeder-0.log'}"
    assert last == "RuntimeError: feeder-0 has no data"
    assert after == "after it: feeder-0 ended: exit code 1 (1×)"
    assert len(environments(folder, "feeder-0")) == 2
    assert (folder / "trainer-0.stopped").exists()


def test_a_killed_host_ends_its_daemon_and_counts_as_one_failure_of_it(nodes: Nodes, folder: Path):
    launcher = launcher_of(folder, {"reward": "work", "trainer": "work"}, supervisor={"max_restarts": 1})
    launcher.start()
    try:
        until(
            lambda: (
                launcher.poll() is None
                and environments(folder, "reward-0")
                and "reward-0" in launcher.processes()
            ),
            "reward",
        )
        pid = launcher.processes()["reward-0"]
        host = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(host, signal.SIGKILL)
        until(lambda: launcher.poll() is None and len(environments(folder, "reward-0")) == 2, "its successor")
        until(lambda: not alive(pid), "the end of the first")
        (folder / "finished").touch()
        until(lambda: launcher.poll() == Outcome(0), "the end of the run")
    finally:
        launcher.close()


def test_daemons_that_nobody_looks_after_end_and_give_back_what_was_reserved(nodes: Nodes, folder: Path):
    launcher = launcher_of(
        folder,
        {"rollout": "work", "trainer": "work"},
        model={"device": "musa"},
        placement={"rollout_num_gpus": 1, "unattended_s": 3},
    )
    launcher.start()
    until(lambda: launcher.poll() is None and len(launcher.processes()) == 2, "both")
    pids = launcher.processes().values()
    assert launcher._lock is not None
    launcher._lock.close()  # as if this process had ended, without a word to anybody
    until(lambda: not any(alive(pid) for pid in pids), "the daemons to end")
    assert (folder / "rollout-0.stopped").exists()
    gpus_are_free(nodes)


def test_a_second_supervisor_of_a_run_is_refused(nodes: Nodes, folder: Path):
    launcher = launcher_of(folder, {"trainer": "work"})
    launcher.start()
    try:
        with pytest.raises(ConfigError, match="is already being run by process"):
            launcher_of(folder, {"trainer": "work"}).start()
    finally:
        launcher.close()


def test_a_second_supervisor_is_refused_also_where_the_lock_does_not_reach_it(nodes: Nodes, folder: Path):
    """A lock on a network's folder may hold on one node alone; the hosts know that they are looked after."""
    launcher = launcher_of(folder, {"trainer": "work"})
    launcher.start()
    until(lambda: launcher.poll() is None and launcher.processes(), "the trainer")
    assert launcher._lock is not None
    launcher._lock.close()
    is_over = threading.Event()

    def look_after() -> None:
        while not is_over.wait(0.1):
            launcher.poll()

    thread = threading.Thread(target=look_after)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="another `millstream run` looks after the job"):
            launcher_of(folder, {"trainer": "work"}).start()
    finally:
        is_over.set()
        thread.join(30)
        launcher.close()
    assert len(environments(folder, "trainer-0")) == 1


def test_a_local_run_is_refused_while_the_daemons_of_a_lost_one_may_go_on_on_the_cluster(
    nodes: Nodes, folder: Path
):
    lost = launcher_of(folder, {"trainer": "work"})
    lost.start()
    until(lambda: lost.poll() is None and lost.processes(), "the trainer")
    assert lost._lock is not None
    lost._lock.close()
    local = LocalLauncher(config_of(folder), [DaemonSpec("trainer")], command=lambda spec: ["true"])
    with pytest.raises(ConfigError, match=r"ray\.job: daemons of this run may go on on a Ray cluster"):
        local.start()
    local.close()
    lost.close()
    assert not (folder / "run" / "ray.job").exists()


def test_a_supervisor_attaches_to_the_daemons_of_one_that_was_lost(nodes: Nodes, folder: Path):
    behaviours = {"feeder": "work", "trainer": "work"}
    lost = launcher_of(folder, behaviours)
    lost.start()
    until(lambda: lost.poll() is None and len(lost.processes()) == 2, "both")
    assert lost._lock is not None
    lost._lock.close()  # as if it had been killed
    again = launcher_of(folder, behaviours)
    again.start()
    try:
        until(lambda: again.poll() is None and len(again.processes()) == 2, "both once more")
        assert again.processes() == lost.processes()
        (folder / "finished").touch()
        until(lambda: again.poll() == Outcome(0), "the end of the run")
    finally:
        again.close()
    assert len(environments(folder, "feeder-0")) == 1


def test_a_job_with_other_settings_is_ended_and_started_anew(nodes: Nodes, folder: Path):
    lost = launcher_of(folder, {"trainer": "work"})
    lost.start()
    until(lambda: lost.poll() is None and lost.processes(), "the trainer")
    assert lost._lock is not None
    lost._lock.close()
    again = launcher_of(folder, {"trainer": "work"}, run={"steps": 7})
    again.start()
    try:
        assert (folder / "trainer-0.stopped").exists()
        until(lambda: again.poll() is None and len(environments(folder, "trainer-0")) == 2, "the new one")
    finally:
        again.close()


def test_ranks_over_several_bundles_begin_and_end_together_and_the_first_to_fail_is_named(
    nodes: Nodes, folder: Path
):
    launcher = launcher_of(
        folder,
        {"trainer": "rank 1 is killed, once"},
        trainer={"backend": "fsdp2", "n_ranks": 2},
        model={"path": "model"},
        rollout={"backend": "torch"},
        placement={"actor_num_nodes": 2},
    )
    launcher.start()
    try:
        until(
            lambda: (
                launcher.poll() is None
                and len(environments(folder, "trainer-0.rank0"))
                == len(environments(folder, "trainer-0.rank1"))
                == 2
            ),
            "both once more",
        )
        (folder / "finished").touch()
        until(lambda: launcher.poll() == Outcome(0), "the end of the run")
    finally:
        launcher.close()
    assert [failure.sentence() for failure in launcher._failures] == [
        "trainer-0 ended: rank 1: killed by SIGKILL"
    ], "one failure, and the cause is not that of rank 0, which followed"
    first, second = (environments(folder, f"trainer-0.rank{rank}")[0] for rank in range(2))
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert {name.name for name in (folder / "run" / "logs").iterdir()} == {
        "trainer-0.log",
        "trainer-0.rank1.log",
    }


def test_the_environment_of_a_daemon_is_the_nodes_own_and_what_the_list_names(nodes: Nodes, folder: Path):
    secret = {"NCCL_DEBUG": "WARN", "AWS_SECRET_ACCESS_KEY": "x", "MY_KEY": "y", "OMP_NUM_THREADS": "3"}
    launcher = launcher_of(
        folder,
        {"trainer": "finish"},
        environ=secret,
        reward={"function": "exact", "options": {"api_key": "env:MY_KEY"}},
    )
    assert run(launcher) == Outcome(0)
    env = environments(folder, "trainer-0")[0]
    assert (env["NCCL_DEBUG"], env["MY_KEY"], env["OMP_NUM_THREADS"]) == ("WARN", "y", "3")
    assert "AWS_SECRET_ACCESS_KEY" not in env
    assert not [name for name in env if name.startswith("RAY_") and name not in os.environ]
    assert sys.executable in (folder / "run" / "logs" / "trainer-0.log").read_text()
