"""A run with a fleet of engines that are killed, frozen, sent away and added while versions are published.

    plan(seed) ─► Fault … ─┐     residents: started again by millstream's own supervisor
    ledger, fleet ─► Watcher ─► its moment comes ─► strike ─► (later: go on, or killed, or added again)
    all struck ─► the fleet whole again at the newest version ─► `run.steps` a little further on, to its end ─► audit

Nothing is faked: the processes are those of `millstream run` and `millstream serve`, with tiny torch engines. What was
done, and when, is kept in `<folder>/faults.jsonl`; the plan is the same for a seed, the moments are the machine's.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.commands import rundir
from engine.config import Config, build_config
from engine.config_fields import replaced
from engine.demo import write_rows
from engine.launch.daemon import Process, last_words
from engine.roles import open_run_log, topics_of
from engine.tasks import get_task
from streams import codec
from streams.codec import Known
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineReady,
    Event,
    Paused,
    Resumed,
    WeightsPublished,
)
from streams.log import EventLog, TopicPartition
from tests.faults.fleet_audit import Figures, audit
from tests.faults.fleet_plan import FREEZE, FREEZE_KILL, KILL, LEAVE, Fault
from tests.faults.harness import Supervised, begin, read_view, supervised

logger = logging.getLogger(__name__)

RESIDENTS, GUESTS = ("rollout-0", "rollout-1"), ("rollout-2",)
DEADLINE_S = 8.0  # weights.transfer_deadline_s
WHOLE_S = (
    600.0  # longest that the fleet may take to be whole again: its processes import torch on a busy machine
)
START_S = 900.0  # until the run is under way
MOMENT_S = 8.0  # a fault is struck at the latest so long after its time
LEAVES_S = 60.0  # longest that a guest may take to end
STEPS_AFTER = 5


# ---------------------------------------------------------------- the run
def configuration(
    folder: Path, *, transport: str, kind: str = "full", log_url: str = "", **changes: dict[str, Any]
) -> Config:
    """A run without an end of its own, its model written into `folder`.

    Deltas are small only where few weights change: bfloat16 and a small learning rate. In full it is float32 and a
    large one, so that two versions are far apart and a mixture of them would show in the log-probs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task = get_task("guess")
    write_rows(folder / "prompts.jsonl", task.rows(seed=1))
    _make_model(folder / "model")
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "fleet", "dir": str(folder / "run")},
        "log": {"partitions": 6, "url": log_url},
        "data": {"path": str(folder / "prompts.jsonl")},
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if kind == "delta" else "float32"},
        "rollout": {
            "replicas": len(RESIDENTS) + len(GUESTS),
            "generate": "guess",
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 10,
            "max_concurrency": 64,
            # about a second an episode, so that most span several versions
            "options": {"slow_tools_sigma": 0.5, "slow_tools_median_s": 0.15},
        },
        "reward": {"function": "engine.demo:reward", "workers": 1},
        "collector": {"member_deadline_s": 10.0},
        "trainer": {
            "rollout_batch_size": 4,
            "num_steps_per_rollout": 1,
            "global_batch_size": 16,
            "lr": 2e-5 if kind == "delta" else 1e-3,
        },
        # a fleet of which two thirds are gone still has a batch in the partitions of the third that is left
        "staleness": {"max_weight_staleness": 3},
        "weights": {
            "transport": transport,
            "kind": kind,
            "full_every": 10,
            "keep": 8,
            "bucket_bytes": 1 << 20,
            "transfer_deadline_s": DEADLINE_S,
        },
        "checkpoint": {"every": 20},
        "supervisor": {"max_restarts": 1000, "window_s": 1.0},
    }
    if log_url.startswith("kafka:"):
        table["log"]["kafka"] = {"session_timeout_s": 6.0}
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


def _make_model(folder: Path) -> None:
    """Untrained, of some 10 MB: a broadcast takes long enough to be hit in the middle."""
    if folder.exists():
        return
    from transformers import GPT2Config, GPT2LMHeadModel

    from engine.tasks import tiny

    task = get_task("guess")
    model = GPT2LMHeadModel(
        GPT2Config(
            n_positions=task.max_length,
            n_embd=256,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **tiny._common(task),
        )
    )
    tiny._initialise(model, _generator(1))
    tiny.save(folder, model.eval(), tiny.build_tokenizer(task))


def _generator(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- following the log
class Engine(NamedTuple):
    """What `fleet` says of an engine last."""

    joined: EngineJoined | None = None  # None: it has left, or has ended
    ready: EngineReady | None = None  # since it joined


class Watcher:
    """Follows `ledger` and `fleet` on a thread: the fleet as it says it is, and a wait for the next event of a type."""

    def __init__(self, config: Config) -> None:
        self.log, self.topics = open_run_log(config, readonly=True), topics_of(config)
        self.engines: dict[str, Engine] = {}
        self.published: WeightsPublished | None = None
        self.error: BaseException | None = None
        self._seen: dict[str, int] = {}  # type → events
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.log.close()

    def wait_for(self, holds: Callable[[], Any], timeout_s: float) -> Any:
        with self._changed:
            return self._changed.wait_for(lambda: holds() or self.error is not None, timeout_s)

    def pid(self, engine: str) -> int | None:
        """Of the process that said last that it joined; None: it holds no version yet."""
        now = self.engines.get(engine, Engine())
        return now.joined.pid if now.joined is not None and now.ready is not None else None

    def count(self, kind: str) -> int:
        """Events of this type so far; for the condition of `wait_for`."""
        return self._seen.get(kind, 0)

    def holds_newest(self, engine: str) -> bool:
        ready, published = self.engines.get(engine, Engine()).ready, self.published
        return (
            ready is not None
            and published is not None
            and (ready.epoch, ready.version, ready.digest)
            == (published.epoch, published.version, published.digest)
        )

    def _run(self) -> None:
        places = {TopicPartition(self.topics.name(word), 0): 0 for word in ("ledger", "fleet")}
        try:
            while not self._stop.is_set():
                news = 0
                for place, position in places.items():
                    batch = self.log.read(*place, position)
                    places[place] = batch.next_position
                    news += batch.next_position - position
                    for record in batch.records:
                        decoded = codec.decode(record)
                        if isinstance(decoded, Known):
                            self._take((record.header("type") or b"").decode(), decoded.event)
                if not news:
                    self.log.wait(places, timedelta(seconds=0.2))
        except BaseException as error:
            self.error = error
            with self._changed:
                self._changed.notify_all()

    def _take(self, kind: str, event: Event) -> None:
        with self._changed:
            self._seen[kind] = self._seen.get(kind, 0) + 1
            if isinstance(event, WeightsPublished) and event.epoch >= (self.published or event).epoch:
                self.published = event
            name = getattr(event, "engine", "")
            now = self.engines.get(name, Engine())
            if isinstance(event, EngineJoined):
                self.engines[name] = Engine(event)
            elif isinstance(event, EngineReady):
                self.engines[name] = now._replace(ready=event)
            elif isinstance(event, EngineLeft) or (
                isinstance(event, EngineFailed) and event.reason == "engine"
            ):
                self.engines[name] = Engine()
            self._changed.notify_all()


# ---------------------------------------------------------------- striking
class Done(NamedTuple):
    """One thing that was done to a process."""

    at_s: float  # from the beginning of the schedule
    victim: str
    what: str  # "kill", "stop", "continue", "terminate", "add"
    pid: int
    moment: str  # the event that it came right after; "": none came in time, or none was waited for


class Crew:
    """The engines of a run that is under way, and what is done to them."""

    def __init__(self, config: Config, launcher: Supervised, watcher: Watcher) -> None:
        self.config, self.launcher, self.watcher = config, launcher, watcher
        self.done: list[Done] = []
        self.problems: list[str] = []
        self._guests: dict[str, Process] = {}
        self._frozen: set[int] = set()
        self._ended: dict[str, int] = {}  # the process of each that was last killed, or asked to leave
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # of freezes and absences, by time
        self._number = itertools.count()
        self._began = time.monotonic()

    def start(self) -> None:
        """Until all engines are there and steps go on."""
        for name in GUESTS:
            self.add(name)
        began = self.watcher.count("batch_cut")
        is_under_way = self.until(
            lambda: (
                bool(self.launcher.crashes)
                or (all(map(self.is_well, self.names)) and self.watcher.count("batch_cut") > began + 2)
            ),
            START_S,
        )
        assert is_under_way and not self.launcher.crashes, f"{self.launcher.crashes} {self.states()}"

    def run(self, faults: Sequence[Fault], duration_s: float) -> None:
        """The schedule, or as much of it as there is time for on a busy machine, where engines take long to start.

        At its end nobody is frozen and every guest is there.
        """
        self._began = time.monotonic()
        for fault in faults:
            self.until(partial(self._is_past, fault.at_s), fault.at_s + WHOLE_S)
            if self._is_past(duration_s):
                break
            self._strike(fault)
        self.until(partial(self._is_past, duration_s), WHOLE_S + duration_s)
        self.until(lambda: not self._ends, 2 * WHOLE_S)

    def add(self, name: str) -> None:
        replica = int(name.rpartition("-")[2])
        run_dir = Path(self.config.run.dir)
        command = [
            *(sys.executable, "-m", "engine.cli", "serve", "rollout", str(run_dir)),
            *("--replica", f"{replica}/{self.config.rollout.replicas}", "--with-parent", str(os.getpid())),
        ]
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = Process(command, run_dir / "logs" / f"{name}.log", {**os.environ, **threads})
        self._guests[name] = process
        self._note(name, "add", process.pid)

    def close(self) -> None:
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        for process in self._guests.values():
            process.terminate()
        deadline = time.monotonic() + 20
        for process in self._guests.values():
            while process.exit_code() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.kill()

    def is_well(self, name: str) -> bool:
        """It runs, is not frozen, and has acknowledged a version since it started."""
        pid = self._pid(name)
        return pid is not None and pid not in self._frozen and self.watcher.pid(name) == pid

    def is_whole(self) -> bool:
        return all(self.is_well(name) and self.watcher.holds_newest(name) for name in self.names)

    @property
    def names(self) -> list[str]:
        return [*RESIDENTS, *self._guests]

    # -- one fault
    def _strike(self, fault: Fault) -> None:
        others = [name for name in (*RESIDENTS, *GUESTS) if name != fault.victim]
        if not self.until(lambda: any(map(self.is_well, others)), WHOLE_S):
            self.problems.append(
                f"nobody but {fault.victim} was well within {WHOLE_S:.0f} s: {self.states()}"
            )
            return
        if not self.until(lambda: self._pid(fault.victim) is not None, WHOLE_S):
            self.problems.append(f"{fault.victim} was not started again within {WHOLE_S:.0f} s")
            return
        moment = self._moment(fault)
        pid = self._pid(fault.victim)
        if pid is None or pid in self._frozen or not any(map(self.is_well, others)):
            return
        if fault.how in (FREEZE, FREEZE_KILL):
            self._frozen.add(pid)
            self._send(fault.victim, "stop", pid, signal.SIGSTOP, moment)
            end = self._kill if fault.how == FREEZE_KILL else self._go_on
            self._later(self._now + fault.seconds, lambda: end(fault.victim, pid))
        elif fault.how in (KILL, LEAVE):
            number = signal.SIGKILL if fault.how == KILL else signal.SIGTERM
            self._send(fault.victim, "kill" if fault.how == KILL else "terminate", pid, number, moment)
            if fault.victim in GUESTS:
                self._later(self._now + fault.seconds, lambda: self._add_again(fault.victim))

    def _moment(self, fault: Fault) -> str:
        before, deadline = self.watcher.count(fault.after), time.monotonic() + MOMENT_S
        while time.monotonic() < deadline:
            if self.watcher.wait_for(lambda: self.watcher.count(fault.after) > before, 0.1):
                time.sleep(fault.delay_s)
                return fault.after
            self._do_what_is_due()
        return ""

    def _go_on(self, victim: str, pid: int) -> None:
        self._frozen.discard(pid)
        self._send(victim, "continue", pid, signal.SIGCONT, "")

    def _kill(self, victim: str, pid: int) -> None:
        self._frozen.discard(pid)
        self._send(victim, "kill", pid, signal.SIGKILL, "")
        if victim in GUESTS:
            self._later(self._now + 0.5, lambda: self._add_again(victim))

    def _add_again(self, name: str) -> None:
        leaving = self._guests[name]
        if not self.until(lambda: leaving.exit_code() is not None, LEAVES_S):
            self.problems.append(f"{name}, process {leaving.pid}, did not end in {LEAVES_S:.0f} s")
            leaving.kill()
        self.add(name)

    def _pid(self, name: str) -> int | None:
        """Of a process that nobody has ended."""
        guest = self._guests.get(name)
        if guest is not None and guest.exit_code() is not None:
            return None
        pid = guest.pid if guest is not None else self.launcher.pid(name)
        return None if pid == self._ended.get(name) else pid

    def _send(self, victim: str, what: str, pid: int, number: int, moment: str) -> None:
        _signal(pid, number)
        if what in ("kill", "terminate"):
            self._ended[victim] = pid
        self._note(victim, what, pid, moment)

    def _note(self, victim: str, what: str, pid: int, moment: str = "") -> None:
        done = Done(round(self._now, 3), victim, what, pid, moment)
        self.done.append(done)
        logger.info("%s", done)
        with (Path(self.config.run.dir).parent / "faults.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(done._asdict()) + "\n")

    # -- time
    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _is_past(self, at_s: float) -> bool:
        return self._now >= at_s

    def _later(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (at_s, next(self._number), action))

    def until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Meanwhile what is due is done: who is frozen goes on."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            self._do_what_is_due()
            time.sleep(0.02)
        return True

    def _do_what_is_due(self) -> None:
        self._look()
        while self._ends and self._ends[0][0] <= self._now:
            heapq.heappop(self._ends)[2]()

    def _look(self) -> None:
        assert self.watcher.error is None, self.watcher.error
        assert not self.launcher.ended, self.launcher.outcome.cause

    def states(self) -> str:
        return "; ".join(
            f"{name}: pid {self._pid(name)}, last joined as {self.watcher.engines.get(name, Engine())}"
            for name in self.names
        )


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---------------------------------------------------------------- a whole schedule
class Summary(NamedTuple):
    """What came of a schedule. `problems` is empty when every promise held."""

    log: str
    transport: str
    kind: str
    seed: int
    seconds: float
    kills: int
    freezes: int
    adds: int
    leaves: int
    trainer_kills: int
    in_a_moment: int  # faults that were struck right after the event that they were planned for
    whole_after_s: float  # from the end of the schedule until every engine held the newest version
    figures: Figures
    problems: list[str]

    def as_json(self) -> str:
        return json.dumps({**self._asdict(), "figures": self.figures._asdict()}, indent=1) + "\n"


def soak(config: Config, faults: Sequence[Fault], *, seed: int, duration_s: float) -> Summary:
    """Strike for `duration_s`, see that the fleet is whole again, let the run go to its end, and audit it."""
    began = time.monotonic()
    begin(config)
    with supervised(config, without=GUESTS) as launcher, watching(config) as watcher:
        crew = Crew(config, launcher, watcher)
        try:
            crew.start()
            crew.run(faults, duration_s)
            whole_after_s = _whole(crew)
        finally:
            crew.close()
    _to_its_end(config)
    problems = [*crew.problems, *_left_behind(config)]
    with open_run_log(config, readonly=True) as log:
        figures, found = audit(
            log, topics_of(config), deadline_s=DEADLINE_S, is_exact=config.model.dtype == "float32"
        )
    what = Counter((done.what, done.victim == "trainer-0") for done in crew.done)
    return Summary(
        log=config.log.url.partition(":")[0],
        transport=config.weights.transport,
        kind=config.weights.kind,
        seed=seed,
        seconds=round(time.monotonic() - began, 1),
        kills=what["kill", False],
        freezes=what["stop", False],
        adds=what["add", False],
        leaves=what["terminate", False],
        trainer_kills=what["kill", True],
        in_a_moment=sum(bool(done.moment) for done in crew.done),
        whole_after_s=round(whole_after_s, 1),
        figures=figures,
        problems=problems + found,
    )


@contextlib.contextmanager
def watching(config: Config) -> Iterator[Watcher]:
    watcher = Watcher(config)
    try:
        yield watcher
    finally:
        watcher.close()


def _whole(crew: Crew) -> float:
    """Seconds until every engine has acknowledged the newest version, while no newer one is made."""
    began = time.monotonic()
    crew.until(lambda: all(map(crew.is_well, crew.names)), WHOLE_S)
    with open_run_log(crew.config) as log:
        _say(log, crew.config, Paused(by="fleet", reason="to see whether the fleet is whole"))
        if not crew.until(crew.is_whole, WHOLE_S):
            crew.problems.append(f"the fleet is not whole after {WHOLE_S:.0f} s: {crew.states()}")
        seconds = time.monotonic() - began
        _say(log, crew.config, Resumed(by="fleet"))
    return seconds


def _say(log: EventLog, config: Config, event: Event) -> None:
    log.append(topics_of(config).name("ledger"), 0, [codec.encode(event, producer="fleet")])


def _to_its_end(config: Config) -> None:
    ending = replaced(config, "run.steps", read_view(config).step + STEPS_AFTER)
    rundir.adopt(ending)
    with supervised(ending) as launcher:
        deadline = time.monotonic() + START_S
        while not launcher.ended:
            assert time.monotonic() < deadline, f"the run does not end; logs in {config.run.dir}/logs"
            time.sleep(0.1)


def _left_behind(config: Config) -> list[str]:
    """Processes of the run that are still there, and tracebacks in the daemons' logs: nobody was to end by itself."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if config.run.dir.encode() in words and b"engine.cli" in words:
                found.append(f"left behind: process {each.parent.name}: {b' '.join(words).decode()}")
    for file in sorted((Path(config.run.dir) / "logs").glob("*.log")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if count := text.count("Traceback (most recent call last)"):
            found.append(f"{file}: {count} tracebacks, the last: {last_words(file)}")
    return found
