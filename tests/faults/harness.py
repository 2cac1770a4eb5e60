"""The kill harness: a seeded schedule of SIGKILLs and stops over a real run, then an audit, then a replay.

    plan(seed) ──► Fault(victim, after, how) … ─┐
    millstream's own daemons ── events ──► the hand-over comes ──► signal ──► wait until the victim is back
                                                                                   └─ next fault
    all faults done ──► SIGTERM ──► `run.steps` a little further on, to its end ──► verify ──► replay ──► Summary

A fault is struck right after an event of its kind lands in the log, so over a schedule every role dies at every
hand-over of the loop. Nothing is faked: processes, signals, log and supervisor are those of `millstream run`.
The replay runs the ledger once more from the initial weights, undisturbed, and must end with the same bits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from consumers.ledger import Ledger
from engine.commands import rundir
from engine.config import Config, build_config
from engine.config_fields import replaced
from engine.launch.local import LocalLauncher, daemons_of
from engine.roles import open_run_log, topics_of
from engine.trainer.resume import resume
from engine.trainer.scalar_backend import ScalarBackend
from engine.weights.store import digest
from replay.ledger import read_run
from replay.verify import verify
from streams.broker.node import Node
from streams.errors import LogUnavailable
from streams.log import EventLog, TopicPartition

logger = logging.getLogger(__name__)

HANDOVERS = {
    "task_dispatched": "tasks",
    "trajectory_finished": "trajectories",
    "reward_assigned": "rewards",
    "group_completed": "groups",
    "batch_cut": "ledger",
    "weights_published": "ledger",
    "checkpoint_saved": "ledger",
    "engine_ready": "fleet",
}
BROKER = "broker"
BACK_S = 60.0  # longest that a victim may take to be at work again
STEPS_AFTER = 5  # steps of the undisturbed end


class Fault(NamedTuple):
    victim: str  # a daemon, as "reward-0", or "broker"
    after: str  # the type of event that it is struck after
    how: str  # "kill" (SIGKILL) or "stop" (SIGSTOP, and SIGCONT after `seconds`)
    seconds: float = 0.0


class Summary(NamedTuple):
    """What came of a schedule. `problems` is empty when every promise held."""

    log: str
    seed: int
    struck: int
    by_victim: dict[str, int]
    steps: int
    groups_trained: int
    epochs: int
    void_records: int
    duplicates_passed_over: int
    seconds: float
    final_digest: str
    replay_digest: str
    problems: list[str]

    def as_json(self) -> str:
        return json.dumps(self._asdict(), indent=1) + "\n"


def plan(seed: int, count: int, victims: Sequence[str], *, stops: float = 0.2) -> list[Fault]:
    """`count` faults: every victim in turn, after every hand-over in turn, in an order that the seed draws."""
    draw = random.Random(seed)
    pairs = [(victim, after) for after in HANDOVERS for victim in victims]
    order: list[tuple[str, str]] = []
    while len(order) < count:
        draw.shuffle(pairs)
        order += pairs
    return [
        Fault(victim, after, "stop", draw.uniform(0.5, 3.0))
        if draw.random() < stops
        else Fault(victim, after, "kill")
        for victim, after in order[:count]
    ]


def configuration(folder: Path, log_url: str = "", **changes: dict[str, Any]) -> Config:
    """A run without torch that has no end of its own: scripted answers, the trainer of one number."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q{i}", "label": "yes"}) + "\n" for i in range(64)))
    table: dict[str, dict[str, Any]] = {
        "run": {"name": "soak", "dir": str(folder / "run")},
        "log": {"partitions": 4, "url": log_url},
        "data": {"path": str(rows)},
        "rollout": {
            "backend": "scripted",
            "replicas": 2,
            "n_samples_per_prompt": 4,
            "max_concurrency": 16,
            "rollout_max_response_len": 16,
            "options": {"policy": "coin", "heads": "yes", "tails": "no", "token_s": 0.02},
        },
        "reward": {"function": "exact", "replicas": 2},
        "collector": {"member_deadline_s": 10.0},
        "trainer": {"backend": "scalar", "rollout_batch_size": 4},
        "checkpoint": {"every": 5},
        # a restart may come at once however many there were, and none is too many
        "supervisor": {"max_restarts": 1000, "window_s": 1.0},
    }
    if log_url.startswith("kafka:"):
        table["log"]["kafka"] = {
            "session_timeout_s": 6.0,
            "delivery_timeout_s": 10.0,
            "request_timeout_s": 3.0,
        }
    for section, values in changes.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


class Broker(NamedTuple):
    """How to strike the broker: both return once it is done."""

    kill: Callable[[], object]
    start: Callable[[], object]
    pause: Callable[[], object]
    resume: Callable[[], object]


def broker_of(node: Node) -> Broker:
    return Broker(kill=node.kill, start=node.start, pause=node.pause, resume=node.resume)


def soak(config: Config, faults: Sequence[Fault], *, seed: int, broker: Broker | None = None) -> Summary:
    """Run the whole schedule. Raises AssertionError, naming it, when a fault is not got over within BACK_S."""
    began = time.monotonic()
    begin(config)
    struck: list[Fault] = []
    with supervised(config) as launcher, open_run_log(config, readonly=True) as log:
        for fault in faults:
            await_event(config, log, fault.after, f"before {fault}")
            strike(launcher, fault, broker)
            struck.append(fault)
            logger.info("%d/%d struck: %s", len(struck), len(faults), fault)
        await_event(config, log, "batch_cut", "after the last fault")
    view = read_view(config)
    ending = replaced(config, "run.steps", view.step + STEPS_AFTER)
    rundir.adopt(ending)
    with supervised(ending) as launcher:
        deadline = time.monotonic() + BACK_S
        while not launcher.ended:
            assert time.monotonic() < deadline, f"the run does not end; logs in {config.run.dir}/logs"
            time.sleep(0.1)
    return summary(ending, struck, seed=seed, seconds=time.monotonic() - began)


def begin(config: Config) -> None:
    """Take the run directory; the topics exist before anything is watched."""
    rundir.adopt(config)
    with open_run_log(config) as log:
        topics_of(config).create(log)


class Supervised:
    """A launcher that is polled on a thread of its own, as `millstream run` polls it.

    `without`: daemons that are for the caller to start.
    """

    def __init__(self, config: Config, without: Collection[str] = ()) -> None:
        daemons = [each for each in daemons_of(config) if each.name not in without]
        self._launcher = LocalLauncher(config, daemons)
        self._stop = threading.Event()
        self.outcome: Any = None
        self.crashes: dict[str, str] = {}  # daemon → how it last ended by itself
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def pid(self, name: str) -> int | None:
        return self._launcher.processes().get(name)

    def names(self) -> list[str]:
        return sorted(self._launcher.processes())

    def start(self) -> None:
        self._launcher.start()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self._launcher.close()

    def _run(self) -> None:
        while not self._stop.is_set() and self.outcome is None:
            self.outcome = self._launcher.poll()
            self.crashes |= {
                each.name: f"{each.sentence()}\n{each.last_words}"
                for each in self._launcher._failures
                if each.code > 0
            }
            self._stop.wait(0.05)


@contextlib.contextmanager
def supervised(config: Config, without: Collection[str] = ()) -> Iterator[Supervised]:
    launcher = Supervised(config, without)
    launcher.start()
    try:
        yield launcher
    finally:
        launcher.close()
    assert launcher.outcome is None or launcher.outcome.code == 0, launcher.outcome.cause


def strike(launcher: Supervised, fault: Fault, broker: Broker | None) -> None:
    if fault.victim == BROKER:
        assert broker is not None
        if fault.how == "kill":
            broker.kill()
            broker.start()
        else:
            broker.pause()
            time.sleep(fault.seconds)
            broker.resume()
        return
    deadline = time.monotonic() + BACK_S
    while (pid := launcher.pid(fault.victim)) is None:  # still being started again after the fault before
        assert not launcher.ended, launcher.outcome.cause
        assert time.monotonic() < deadline, f"{fault.victim} is not started again"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        if fault.how == "kill":
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        time.sleep(fault.seconds)
        os.kill(pid, signal.SIGCONT)


def await_event(config: Config, log: EventLog, kind: str, when: str) -> None:
    """Wait until another event of this type lands, in any partition."""
    topics = topics_of(config)
    word = HANDOVERS[kind]
    deadline = time.monotonic() + BACK_S
    positions = {
        TopicPartition(topics.name(word), p): patiently(deadline, log.end, topics.name(word), p)
        for p in range(topics.count(word))
    }
    while True:
        assert time.monotonic() < deadline, (
            f"no {kind} within {BACK_S:.0f} s {when}; logs in {config.run.dir}/logs"
        )
        patiently(deadline, log.wait, positions, timedelta(seconds=0.2))
        for place, position in positions.items():
            batch = patiently(deadline, log.read, *place, position)
            positions[place] = batch.next_position
            if any(record.header("type") == kind.encode() for record in batch.records):
                return


def patiently(deadline: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """The watcher outlives the broker too."""
    while True:
        try:
            return call(*arguments)
        except LogUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def read_view(config: Config):
    with open_run_log(config, readonly=True) as log:
        return read_run(log, topics_of(config))


def summary(config: Config, struck: Sequence[Fault], *, seed: int, seconds: float) -> Summary:
    problems: list[str] = []
    with open_run_log(config, readonly=True) as log:
        report = verify(log, topics_of(config))
        view = read_run(log, topics_of(config))
    problems += [violation.text for check in report.checks for violation in check.violations]
    if view.finished is None:
        problems.append("the run has no RunFinished")
    final = view.versions[-1].digest if view.versions else ""
    again = replay_digest(config)
    if final != again:
        problems.append(f"the weights of the run ({final[:12]}) are not those of its replay ({again[:12]})")
    return Summary(
        log=config.log.url.partition(":")[0],
        seed=seed,
        struck=len(struck),
        by_victim=dict(Counter(fault.victim for fault in struck)),
        steps=view.step,
        groups_trained=len(view.groups_trained()),
        epochs=len(view.epochs),
        void_records=len(view.void),
        duplicates_passed_over=view.duplicates,
        seconds=round(seconds, 1),
        final_digest=final,
        replay_digest=again,
        problems=problems,
    )


def replay_digest(config: Config) -> str:
    """Digest of the weights after the whole ledger, made again from the initial ones by the trainer's own recovery."""
    backend = ScalarBackend(
        lr=config.trainer.lr, beta1=config.trainer.adam_beta1, beta2=config.trainer.adam_beta2
    )
    topics = topics_of(config)
    with open_run_log(config, readonly=True) as log:
        ledger = Ledger(log, topics)
        history = ledger.catch_up()
        ledger.checkpoints.clear()  # from the very beginning
        resume(log, topics, ledger, history, backend, Path(config.run.dir) / "none", digest=digest)
    return digest(backend.weights())
