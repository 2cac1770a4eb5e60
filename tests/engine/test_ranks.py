"""Ranks as processes: how they talk, and that none outlives another, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import build_config
from engine.interfaces import BadStep
from engine.trainer import ranks
from engine.trainer.followers import RankLost
from engine.trainer.links import Link, LinkLost
from engine.trainer.messages import Answer, Take
from engine.trainer.parts import PartSettings
from engine.trainer.plan import plan_step
from engine.trainer.ranked_backend import RankedBackend
from engine.trainer.torch_settings import TorchSettings
from streams.errors import ConfigError
from tests.engine.ranks_support import torch_as_it_was
from tests.engine.trainer_support import batch_of, folder_of, tiny_qwen3

pytestmark = pytest.mark.timeout(600)
SOON_S = 180.0  # machines under test may be slow; what is judged is that it happens at all, and why
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tiny_qwen3(), tmp_path_factory.mktemp("qwen3"))


# ---------------------------------------------------------------- links
class Ends:
    """Both ends of a connection, and what each heard."""

    def __init__(self, **settings: Any) -> None:
        self.sockets = socket.socketpair()
        self.heard: list[list[Any]] = [[], []]
        self.ended: list[list[str]] = [[], []]
        self.links = [
            Link(each, Take | Answer, self.heard[at].append, self.ended[at].append, **settings)
            for at, each in enumerate(map(_over_tcp, self.sockets))
        ]

    def close(self) -> None:
        for link in self.links:
            link.close()


def _over_tcp(end: socket.socket) -> Any:
    """A socket pair has no TCP options; nothing else differs."""

    class Plain:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: None) if name == "setsockopt" else getattr(end, name)

    return Plain()


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(**settings: Any) -> Ends:
        made.append(Ends(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_plan_and_arrays_arrive_as_they_were_sent(ends: Callable[..., Ends]):
    both = ends()
    plan = plan_step(batch_of(9, seed=2), TorchSettings(num_steps_per_rollout=2, loss_aggregation="sample"))
    both.links[0].send(Take(7, plan))
    both.links[1].send(Answer(7, arrays={"is_clipped": np.array([True, False]), "none": np.empty((0, 3))}))
    until(lambda: both.heard[0] and both.heard[1], "nothing came")
    (take,), (answer,) = both.heard[1], both.heard[0]
    assert take.number == 7 and len(take.plan.parts) == len(plan.parts)
    for ours, theirs in zip(take.plan.flat, plan.flat, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert take.plan.flat.ids.flags.writeable
    assert answer.arrays["is_clipped"].tolist() == [True, False] and answer.arrays["none"].shape == (0, 3)


def test_a_closed_connection_is_told_once_and_ends_sending(ends: Callable[..., Ends]):
    both = ends(beat=timedelta(seconds=0.05))
    both.sockets[0].shutdown(socket.SHUT_RDWR)
    until(lambda: both.ended[1], "the end was not noticed")
    with pytest.raises(LinkLost, match="it ended"):
        both.links[1].send(Answer(1))
    time.sleep(0.2)
    assert both.ended[1] == ["it ended: its connection is closed"]


def test_silence_is_told_and_heartbeats_are_no_silence(ends: Callable[..., Ends]):
    beating = ends(beat=timedelta(seconds=0.1), silent=timedelta(seconds=2))
    silent = ends(beat=timedelta(seconds=600), silent=timedelta(seconds=1))
    until(lambda: silent.ended[0] and silent.ended[1], "silence was not noticed")
    assert silent.ended[0] == ["no sign of life for 1 s"]
    time.sleep(2.5)
    assert beating.ended == [[], []]


def test_what_is_no_message_ends_the_connection(ends: Callable[..., Ends]):
    both = ends()
    both.sockets[0].sendall((3).to_bytes(8, "little") + b"\xc1\xc1\xc1")
    until(lambda: both.ended[1], "garbage was not noticed")
    assert "it sent what is no message" in both.ended[1][0]


# ---------------------------------------------------------------- lives and deaths
@contextmanager
def trainer(folder: Path, log: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(rank 0, process id of rank 1), in the middle of a step."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.ranked_trainer", str(folder)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
    timer = threading.Timer(2.5 * SOON_S, process.kill)
    timer.start()
    follower = 0
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"], log.read_text()
        follower = int(words[1])
        for _ in range(2):
            assert process.stdout.readline() == "step\n", log.read_text()
        time.sleep(0.1)
        yield process, follower
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if follower and is_alive(follower):
            os.kill(follower, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_follower_killed_in_a_step_ends_the_trainer_which_says_who_and_how(folder: Path, tmp_path: Path):
    with trainer(folder, tmp_path / "log") as (process, follower):
        os.kill(follower, signal.SIGKILL)
        assert process.wait(SOON_S) == 1
    said = (tmp_path / "log").read_text()
    assert f"rank 1 (process {follower} on {socket.gethostname()}): it ended" in said
    assert "killed by SIGKILL" in said


@pytest.mark.slow
def test_a_follower_that_hangs_in_a_step_ends_the_trainer_which_says_who(folder: Path, tmp_path: Path):
    """Stopped, it keeps its connections: rank 0 waits in a collective that nothing but its silence can end."""
    with trainer(folder, tmp_path / "log") as (process, follower):
        os.kill(follower, signal.SIGSTOP)
        assert process.wait(SOON_S) == 1
        os.kill(follower, signal.SIGKILL)
    said = (tmp_path / "log").read_text()
    assert f"rank 1 (process {follower} on {socket.gethostname()}): no sign of life for 15 s" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_followers_end_with_a_rank_0_that_is_killed_in_a_step(folder: Path, tmp_path: Path):
    with trainer(folder, tmp_path / "log") as (process, follower):
        assert is_alive(follower)
        process.kill()
        until(lambda: not is_alive(follower), "the follower outlives rank 0")


def test_a_lost_rank_is_told_by_every_call_and_close_ends_what_is_left(folder: Path):
    settings = TorchSettings(lr=0.01, threads=1)
    part = PartSettings(backend="fsdp2", model=str(folder), torch=settings, options={})
    given_up: list[str] = []
    with torch_as_it_was():
        backend = RankedBackend(part, 2, last_resort=given_up.append)
        try:
            process = next(iter(backend._followers._processes.values()))
            backend.step(batch_of(8, seed=1))
            process.kill()
            until(backend._followers.lost, "the loss was not noticed")
            for call in (lambda: backend.step(batch_of(8, seed=2)), backend.weights, backend.snapshot):
                with pytest.raises(RankLost, match=r"rank 1 \(process .*killed by SIGKILL"):
                    call()
        finally:
            backend.close()
        assert process.poll() is not None and given_up == []
        _forget_group()


def test_an_error_of_one_rank_alone_ends_the_trainer_with_that_error(folder: Path):
    part = PartSettings(backend="fsdp2", model=str(folder), torch=TorchSettings(threads=1), options={})
    given_up: list[str] = []
    with torch_as_it_was():
        backend = RankedBackend(part, 2, last_resort=given_up.append)
        try:
            plan = plan_step(batch_of(4, seed=1), TorchSettings())
            broken = plan._replace(flat=plan.flat._replace(row_starts=plan.flat.row_starts[:1]))
            number = backend._command(lambda number, rank: Take(number, broken))
            with pytest.raises(RankLost, match=r"rank 1 .*it failed: IndexError"):
                backend._answers(number)
        finally:
            backend.close()
        _forget_group()


def test_a_part_that_cannot_be_made_leaves_nothing_behind(folder: Path):
    settings = TorchSettings(threads=1)
    options = {"no_such_option": 1}
    part = PartSettings(backend="fsdp2", model=str(folder), torch=settings, options=options)
    with torch_as_it_was(), pytest.raises(ConfigError, match=r"trainer\.fsdp2: .*no_such_option"):
        RankedBackend(part, 1)
    assert not torch.distributed.is_initialized()


def _forget_group() -> None:
    """A trainer that has lost a rank leaves torch's group to the end of its process, which this one is not at."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- torchrun
def test_torchrun_s_variables_say_where_a_process_is():
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    place = ranks.place_of(environ)
    assert place == (3, 4, 1, "node-0", 29500, False, "millstream/2")
    assert ranks.place_of({}) is None
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        ranks.place_of({"RANK": "0", "WORLD_SIZE": "2"})


def test_processes_that_were_started_elsewhere_are_one_trainer(folder: Path):
    """As torchrun does it: every process has its variables, and rank 0 starts nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    of_zero = ranks.Place(0, 2, 0, "127.0.0.1", port, hosts_store=True, prefix="millstream/0")
    of_one = of_zero._replace(rank=1, local_rank=1, hosts_store=False)
    follower = subprocess.Popen(
        [sys.executable, "-m", "engine.trainer.follower"],
        cwd=ROOT,
        env=os.environ | ranks.variables(of_one) | {"OMP_NUM_THREADS": "1"},
    )
    settings = TorchSettings(lr=0.01, threads=1)
    part = PartSettings(backend="fsdp2", model=str(folder), torch=settings, options={})
    try:
        with torch_as_it_was():
            backend = RankedBackend(part, place=of_zero)
            try:
                backend.step(batch_of(8, seed=1))
                assert backend.rank.processes.size == 2
                with pytest.raises(BadStep, match="all masked"):
                    backend.step(masked(batch_of(4, seed=1)))
            finally:
                follower.send_signal(signal.SIGSTOP)
                backend.close()
        follower.send_signal(signal.SIGCONT)  # it hears of the connection's end together with the Close
        assert follower.wait(SOON_S) == 0, "an orderly end"
    finally:
        follower.kill()
        follower.wait()


def masked(batch: Any) -> Any:
    return batch._replace(
        samples=[each._replace(loss_mask=np.zeros_like(each.loss_mask)) for each in batch.samples]
    )


def _config(tmp_path: Path, **trainer_settings: Any) -> Any:
    table = {
        "run": {"name": "r", "dir": str(tmp_path / "run")},
        "data": {"path": str(tmp_path / "data.jsonl")},
        "model": {"path": str(tmp_path)},
        "reward": {"function": "exact_match"},
        "trainer": trainer_settings,
    }
    return build_config(table, (), {})


def test_serve_trainer_is_a_follower_where_torchrun_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from engine import roles

    served: list[Any] = []
    monkeypatch.setattr("engine.trainer.follower.serve", lambda place: served.append(place) or 0)
    for name, value in ranks.variables(ranks.Place(1, 2, 1, "h", 1, hosts_store=False, prefix="")).items():
        monkeypatch.setenv(name, value)
    config = _config(tmp_path, backend="fsdp2", n_ranks=2)
    assert roles.serve("trainer", config, replica=0, replicas=1, stop=lambda: True) == 0
    assert served[0].rank == 1 and not (tmp_path / "run").exists()  # it opened no log
    with pytest.raises(ConfigError, match=r"trainer\.n_ranks = 3, and WORLD_SIZE = 2"):
        other = _config(tmp_path, backend="fsdp2", n_ranks=3)
        roles.serve("trainer", other, replica=0, replicas=1, stop=lambda: True)


def test_a_trainer_of_one_process_has_one_rank(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'trainer\.n_ranks = 2 with trainer\.backend = "torch"'):
        _config(tmp_path, backend="torch", n_ranks=2)


def test_devices_of_a_host_go_to_its_ranks_in_order(monkeypatch: pytest.MonkeyPatch):
    answers = {"device_count": staticmethod(lambda: 4), "is_available": staticmethod(lambda: True)}
    module = type("module", (), answers)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert ranks.device_of("cpu", 3) == torch.device("cpu")
    assert [str(ranks.device_of("cuda", rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert str(ranks.device_of("cuda:2", 1)) == "cuda:3"
    with pytest.raises(ConfigError, match="needs cuda:4, which has 4 devices"):
        ranks.device_of("cuda", 4)
