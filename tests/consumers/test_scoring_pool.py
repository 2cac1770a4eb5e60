"""The scoring pool with real processes: deadlines, crashes, attribution, order, end of life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.rewards import NotScored, Outcome, RewardInput, Scored
from consumers.rewards.pool import PoolClosed, PoolError, ScoringPool
from streams.errors import ConfigError

# What user code may do wrong, one function each. `response` says what a sample does.
USER_CODE = """
import asyncio, os, signal, subprocess, sys, time
def score(sample):
    do = sample.response
    if do == "hang": exec("while True: pass")
    if do == "sleep": time.sleep(1000)
    if do == "slow": time.sleep(1.2)
    if do == "raise": raise RuntimeError("no judge")
    if do == "exit": sys.exit(3)
    if do == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if do == "killed once":
        if not os.path.exists(sample.label): open(sample.label, "w"); os.kill(os.getpid(), signal.SIGKILL)
    if do == "child":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(sample.label, "w").write(str(child.pid)); time.sleep(1000)
    if do == "print": print("x" * 100_000); os.write(1, b"\\0\\0\\0\\0" * 1000)
    if do == "none": return None
    if do == "nan": return float("nan")
    if do == "text": return "1.0"
    if do == "pid": return os.getpid()
    if do == "ids": return {"reward": int(sample.response_ids.sum()), "length": sample.response_length}
    return 1.0

in_flight = 0

async def judge(sample):
    global in_flight
    do = sample.response
    if do == "all together":
        in_flight += 1
        while in_flight < int(sample.label): await asyncio.sleep(0.01)
        return 1.0
    if do == "await": await asyncio.sleep(1000)
    if do == "block": exec("while True: pass")
    if do == "block inside": await asyncio.gather(asyncio.sleep(0), block())
    if do == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if do == "raise": raise RuntimeError("no judge")
    if do == "timeout": raise asyncio.TimeoutError("theirs")
    if do == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    await asyncio.sleep(0.2)
    return 1.0

async def block(): exec("while True: pass")

def best_of(samples):
    best = max(len(s.response) for s in samples)
    if best == 9: return [1.0]
    if best == 8: return [1.0] * 1000
    return [None if s.response == "" else float(len(s.response) == best) for s in samples]

def returns_coroutine(sample): return judge(sample)
"""


@pytest.fixture(scope="module", autouse=True)
def user_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "pool_user_code.py").write_text(USER_CODE)
    (folder / "pool_exits.py").write_text("import os; os._exit(7)")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def inputs(*responses: str, label: Any = "4", start: int = 0, **metadata: Any) -> list[RewardInput]:
    return [
        RewardInput(uid=f"0-0/{i}/0", group_id="0-0", index=i, response=each, label=label, metadata=metadata)
        for i, each in enumerate(responses, start)
    ]


def pool(function: str = "score", *, workers: int = 1, timeout_s: float = 20, **more: Any) -> ScoringPool:
    path = function if function in ("numeric", "regex", "exact") else f"pool_user_code:{function}"
    options = more.pop("options", {})
    return ScoringPool(path, options, workers=workers, timeout=timedelta(seconds=timeout_s), **more)


def kinds(outcomes: list[Outcome]) -> list[Any]:
    return [each.reward if isinstance(each, Scored) else each.reason for each in outcomes]


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "not so within the deadline"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def workers_now() -> Callable[[], list[int]]:
    """The processes that this test's pools have now, without those of the session (a broker, a server)."""
    before = set(children(os.getpid()))
    return lambda: [pid for pid in children(os.getpid()) if pid not in before]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def is_idle(pid: int) -> bool:
    """Every thread sleeps: nothing computes."""
    states = [
        path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"S"}


# ---------------------------------------------------------------- O20
@pytest.mark.parametrize("workers", [1, 2])
def test_o20_one_call_that_never_returns_costs_its_own_sample_only(
    workers: int, workers_now: Callable[[], list[int]]
):
    """The case asks for 4 s and 5 s with a limit of 2 s: one limit and a new worker, where this allows for a machine
    that does other things meanwhile."""
    eight = inputs(*["aaa"] * 4, "a" * 40 + "b", *["aaa"] * 3, pattern=r"^(a+)+$")
    with pool("regex", workers=workers, timeout_s=2) as scoring:
        outcomes = scoring.submit(eight).result(30)
        assert kinds(outcomes) == [1, 1, 1, 1, "reward_timeout", 1, 1, 1]
        assert isinstance(outcomes[4], NotScored) and "regex.py" in outcomes[4].detail
        assert kinds(scoring.submit(inputs(*["aaa"] * 8, pattern="a")).result(30)) == [1] * 8
        assert scoring.workers_lost == 1
        wait_until(lambda: len(workers_now()) == workers)
        wait_until(lambda: all(is_idle(pid) for pid in workers_now()))


def test_an_exception_costs_its_own_sample_only():
    with pool() as scoring:
        outcomes = scoring.submit(inputs("ok", "raise", "exit", "ok")).result(20)
    assert kinds(outcomes) == [1, "reward_error", "reward_error", 1]
    assert isinstance(outcomes[1], NotScored)
    assert (
        outcomes[1].detail.startswith("RuntimeError: no judge (line ")
        and "pool_user_code.py" in outcomes[1].detail
    )


def test_missing_nonfinite_and_wrong_results_are_never_a_reward():
    with pool() as scoring:
        outcomes = scoring.submit(inputs("none", "nan", "text", "ok")).result(20)
    assert kinds(outcomes) == ["reward_missing", "reward_nonfinite", "reward_error", 1]


def test_a_sleeping_call_is_ended_like_a_busy_one():
    with pool(timeout_s=1) as scoring:
        assert kinds(scoring.submit(inputs("ok", "sleep", "hang", "ok")).result(30)) == [
            1, "reward_timeout", "reward_timeout", 1,
        ]  # fmt: skip


def test_hangs_in_the_middle_of_large_messages_are_blamed_on_the_right_samples():
    with pool(timeout_s=1, workers=2) as scoring:
        scoring.submit(inputs(*["ok"] * 500)).result(30)  # quick: messages grow to 64 samples
        many = ["ok"] * 300
        many[70] = many[150] = "hang"
        many[151] = "raise"
        outcomes = kinds(scoring.submit(inputs(*many)).result(30))
    assert [i for i, each in enumerate(outcomes) if each != 1.0] == [70, 150, 151]
    assert (outcomes[70], outcomes[150], outcomes[151]) == (
        "reward_timeout",
        "reward_timeout",
        "reward_error",
    )


def test_what_waits_behind_a_slow_sample_goes_to_an_idle_worker():
    with pool(timeout_s=100, workers=2) as scoring:
        scoring.submit(inputs(*["ok"] * 500)).result(30)
        slow = scoring.submit(inputs("sleep", *["ok"] * 63))
        quick = scoring.submit(inputs(*["ok"] * 64))
        assert kinds(quick.result(30)) == [1] * 64
        wait_until(lambda: [uid for uid, _ in scoring.in_hand()] == ["0-0/0/0"])  # the others are done
        assert not slow.done() and scoring.workers_lost == 0  # long before the slow one's deadline


def test_a_worker_that_gets_no_time_to_begin_a_message_scores_it_as_soon_as_it_does(
    workers_now: Callable[[], list[int]],
):
    """On a busy machine a worker may sleep for longer than the pool's patience with one sample."""
    with pool(timeout_s=100) as scoring:
        scoring.submit(inputs(*["ok"] * 500)).result(30)  # quick: messages grow to 64 samples
        (worker,) = workers_now()
        wait_until(lambda: is_idle(worker))
        os.kill(worker, signal.SIGSTOP)
        future = scoring.submit(inputs(*["ok"] * 20))
        wait_until(lambda: len(scoring.in_hand()) == 20)
        wait_until(lambda: len(scoring.in_hand()) == 1)  # the others may go to another worker
        os.kill(worker, signal.SIGCONT)
        assert kinds(future.result(30)) == [1] * 20
        assert scoring.workers_lost == 0


def test_a_worker_that_crashes_costs_its_own_sample_only():
    with pool() as scoring:
        outcomes = scoring.submit(inputs("ok", "segv", "ok")).result(20)
        assert kinds(outcomes) == [1, "worker_died", 1]
        assert isinstance(outcomes[1], NotScored) and "SIGSEGV" in outcomes[1].detail


def test_a_sample_whose_worker_was_killed_from_outside_is_scored_again(tmp_path: Path):
    with pool() as scoring:
        outcomes = scoring.submit(inputs("killed once", "ok", label=str(tmp_path / "once"))).result(20)
    assert kinds(outcomes) == [1, 1]


def test_an_idle_worker_that_is_killed_is_replaced():
    with pool() as scoring:
        (first,) = kinds(scoring.submit(inputs("pid")).result(20))
        os.kill(int(first), signal.SIGKILL)
        (second,) = kinds(scoring.submit(inputs("pid")).result(20))
        assert second != first and is_running(int(second))


def test_what_the_user_code_started_ends_with_its_worker(tmp_path: Path):
    note = tmp_path / "pid"
    with pool(timeout_s=1) as scoring:
        assert kinds(scoring.submit(inputs("child", label=str(note))).result(20)) == ["reward_timeout"]
    wait_until(lambda: not is_running(int(note.read_text())))


def test_what_user_code_prints_does_not_disturb(capfd: pytest.CaptureFixture[str]):
    with pool() as scoring:
        assert kinds(scoring.submit(inputs("print", "ok")).result(20)) == [1, 1]
    out, err = capfd.readouterr()
    assert out == "" and "xxx" in err


def test_outcomes_keep_their_order_and_arrays_arrive():
    samples = [
        RewardInput(
            uid=f"0-{i}/0/0", group_id=f"0-{i}", index=0, response="ids", response_ids=np.arange(i, dtype=np.int32),
            response_length=i, prompt=[{"role": "user", "content": "?"}], metadata={"a": {"b": [1, None]}},
        )
        for i in range(200)
    ]  # fmt: skip
    with pool(workers=2) as scoring:
        outcomes = scoring.submit(samples).result(20)
    assert [(each.reward, each.components["length"]) for each in outcomes if isinstance(each, Scored)] == [
        (i * (i - 1) / 2, i) for i in range(200)
    ]


def test_a_sample_that_cannot_be_sent_fails_alone():
    with pool() as scoring:
        outcomes = scoring.submit([*inputs("ok"), *inputs("ok", label=object())]).result(20)
        assert kinds(outcomes) == [1, "reward_error"]
        assert scoring.submit([]).result(1) == []


# ---------------------------------------------------------------- async
def test_async_calls_run_together_and_each_has_its_own_deadline():
    with pool("judge", timeout_s=3) as scoring:
        # each of them waits for all the others
        assert kinds(scoring.submit(inputs(*["all together"] * 30, label="30")).result(30)) == [1] * 30
        outcomes = scoring.submit(inputs("ok", "await", "raise", "timeout", "ok")).result(30)
        assert kinds(outcomes) == [1, "reward_timeout", "reward_error", "reward_error", 1]
        assert scoring.workers_lost == 0


@pytest.mark.parametrize("how", ["block", "block inside"])
def test_an_async_call_that_blocks_the_loop_is_found_and_killed(how: str):
    with pool("judge", timeout_s=1) as scoring:
        outcomes = scoring.submit(inputs("ok", "ok", how, "ok", "ok")).result(20)
        assert kinds(outcomes) == [1, 1, "reward_timeout", 1, 1]
        assert scoring.workers_lost == 1


def test_an_async_call_that_swallows_its_cancellation_is_killed():
    with pool("judge", timeout_s=1) as scoring:
        assert kinds(scoring.submit(inputs("ok", "stubborn", "ok")).result(30)) == [1, "reward_timeout", 1]


def test_an_async_call_that_crashes_its_worker_costs_its_own_sample_only():
    with pool("judge") as scoring:
        assert kinds(scoring.submit(inputs("ok", "ok", "segv", "ok")).result(20)) == [1, 1, "worker_died", 1]


def test_a_plain_function_may_return_a_coroutine():
    with pool("returns_coroutine") as scoring:
        assert kinds(scoring.submit(inputs("ok", "raise")).result(20)) == [1, "reward_error"]


# ---------------------------------------------------------------- groups, inline
def test_a_group_function_is_called_once_for_each_group():
    samples = inputs("a", "bb", "cc")
    samples += [RewardInput(uid="0-1/0/0", group_id="0-1", index=0, response="x")]
    samples += [
        RewardInput(uid="0-2/0/0", group_id="0-2", index=i, response=each) for i, each in enumerate(("", "y"))
    ]
    with pool("best_of", group=True) as scoring:
        assert kinds(scoring.submit(samples).result(20)) == [0, 1, 1, 1, "reward_missing", 1]
        outcomes = scoring.submit(inputs("a", "123456789")).result(20)
        assert kinds(outcomes) == ["reward_error"] * 2
        assert isinstance(outcomes[0], NotScored) and "1 rewards for a group of 2" in outcomes[0].detail


def test_inline_mode_scores_in_the_callers_thread(workers_now: Callable[[], list[int]]):
    with pool("score", workers=0, timeout_s=1) as scoring:
        assert workers_now() == []
        future = scoring.submit(inputs("pid", "raise", "nan", "slow", "exit"))
        assert future.done()
        assert kinds(future.result(0)) == [
            os.getpid(), "reward_error", "reward_nonfinite", "reward_timeout", "reward_error",
        ]  # fmt: skip
    with pytest.raises(ConfigError, match="async and needs a worker"):
        pool("judge", workers=0)


# ---------------------------------------------------------------- start and end
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("numerik", "did you mean 'numeric'"),
        ("no_such_module_xyz:f", "no module no_such_module_xyz"),
        ("pool_user_code:scor", "has no 'scor'; it has score"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(
    path: str, says: str, workers_now: Callable[[], list[int]]
):
    with pytest.raises(ConfigError, match=says):
        ScoringPool(path, {}, workers=2, timeout=timedelta(seconds=5))
    wait_until(lambda: workers_now() == [])


def test_a_module_that_ends_its_process_is_refused_with_its_exit_code():
    with pytest.raises(Exception, match="ended with exit code 7 before it was ready"):
        ScoringPool("pool_exits:f", {}, workers=1, timeout=timedelta(seconds=5))


def test_a_worker_that_cannot_be_replaced_fails_its_samples_and_does_not_hang_them(tmp_path: Path):
    (tmp_path / "breaks_later.py").write_text(
        f"import os\nif os.path.exists({str(tmp_path / 'broken')!r}): raise RuntimeError('no licence')\n"
        "def score(sample): return os.getpid()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        with ScoringPool("breaks_later:score", {}, workers=1, timeout=timedelta(seconds=20)) as scoring:
            (pid,) = kinds(scoring.submit(inputs("ok")).result(20))
            (tmp_path / "broken").touch()
            os.kill(int(pid), signal.SIGKILL)
            (outcome,) = scoring.submit(inputs("ok")).result(30)
            assert isinstance(outcome, NotScored) and outcome.reason == "worker_died"
            assert "no licence" in outcome.detail
            (tmp_path / "broken").unlink()
            wait_until(lambda: kinds(scoring.submit(inputs("ok")).result(20)) != ["worker_died"], 20)
    finally:
        sys.path.remove(str(tmp_path))


def test_a_fault_of_the_pool_itself_ends_it_with_an_error_and_not_with_outcomes(
    monkeypatch: pytest.MonkeyPatch,
):
    with pool(timeout_s=100) as scoring:
        future = scoring.submit(inputs("sleep", "ok"))
        wait_until(lambda: len(scoring.in_hand()) >= 1)

        def fault(slot: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(scoring, "take", fault)
        with pytest.raises(PoolError, match="a bug"):
            scoring.submit(inputs("ok")).result(10)
        with pytest.raises(PoolError, match="a bug"):
            future.result(10)
        with pytest.raises(PoolError, match="a bug"):
            scoring.submit(inputs("ok"))


def test_close_is_quick_and_leaves_neither_processes_nor_futures_behind(
    workers_now: Callable[[], list[int]],
):
    scoring = pool(workers=2, timeout_s=100)
    future = scoring.submit(inputs("hang", "hang", "ok", "ok"))
    wait_until(lambda: len(scoring.in_hand()) >= 2)
    workers = workers_now()
    assert len(workers) == 2
    begun = time.monotonic()
    scoring.close()
    assert time.monotonic() - begun < 20  # it waits for no deadline of a sample
    with pytest.raises(PoolClosed):
        future.result(1)
    with pytest.raises(PoolClosed):
        scoring.submit(inputs("ok"))
    assert not any(is_running(pid) for pid in workers)
    scoring.close()  # again: harmless


def test_a_pool_gives_its_descriptors_back():
    pool().close()
    before = len(os.listdir("/proc/self/fd"))
    with pool(timeout_s=0.3) as scoring:
        scoring.submit(inputs("hang", "segv", "ok")).result(20)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("do", ["sleep", "hang", "idle"])
def test_workers_end_when_their_parent_is_killed(do: str, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path[:] = {sys.path!r}
            from datetime import timedelta
            from consumers.rewards import RewardInput
            from consumers.rewards.pool import ScoringPool
            pool = ScoringPool("pool_user_code:score", {{}}, workers=2, timeout=timedelta(seconds=1000))
            pool.submit([RewardInput(uid="u", group_id="g", index=0, response={do!r})] * 2)
            print("ready", flush=True)
            sys.stdin.read()
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        workers = children(parent.pid)
        assert len(workers) == 2
        parent.kill()
        parent.wait(30)
    wait_until(lambda: not any(is_running(pid) for pid in workers))
