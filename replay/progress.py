"""A run as it goes: ledger and metrics, followed together. The live view and the summary both read this.

    ledger ──┐
    metrics ─┴─► RunProgress.catch_up() ──► steps, evaluations, throughput, shares of time

Everything comes from the log, so a view that is opened late, or after the end, shows the same as one that was there
from the start.
"""

from __future__ import annotations

from typing import NamedTuple

from replay.ledger import LedgerReader
from replay.records import TopicReader, entries
from replay.topics import waiting
from streams.events import Metrics, RewardAssigned, TaskDispatched
from streams.log import EventLog
from streams.topics import Topics


class TrainerStep(NamedTuple):
    step: int
    at_ms: int
    values: dict[str, float]


class Evaluation(NamedTuple):
    """Mean reward on held-out prompts."""

    version: int
    at_ms: int
    reward: float


class Engine:
    """What the metrics of one rollout daemon add up to; counters start again at 0 when it is restarted."""

    def __init__(self) -> None:
        self.tokens = 0.0  # generated since the run began
        self.busy: list[tuple[int, float]] = []  # (at_ms, share of the time since the one before)
        self.version = -1
        self._counter = 0.0

    def add(self, event: Metrics) -> None:
        total = event.values.get("tokens_total", self._counter)
        self.tokens += total - self._counter if total >= self._counter else total
        self._counter = total
        self.version = int(event.values.get("version", self.version))
        if "busy" in event.values:
            self.busy.append((event.at_ms, event.values["busy"]))


class RunProgress:
    """Call `catch_up` now and then; the attributes are the state at that moment."""

    def __init__(self, log: EventLog, topics: Topics) -> None:
        self._log, self._topics = log, topics
        self._ledger = LedgerReader(log, topics)
        self._metrics = TopicReader(log, topics.name("metrics"), 0)
        self.view = self._ledger.view
        self.steps: list[TrainerStep] = []  # one a step, ascending
        self.evaluations: list[Evaluation] = []
        self.engines: dict[str, Engine] = {}
        self.latest: dict[str, Metrics] = {}  # source → its newest metrics
        self._first_dispatch_ms: int | None = None

    def catch_up(self) -> None:
        self._ledger.catch_up()
        for entry in self._metrics.catch_up():
            if isinstance(entry.event, Metrics):
                self._add(entry.event)

    def _add(self, event: Metrics) -> None:
        self.latest[event.source] = event
        if event.source == "trainer" and event.step >= 0:
            self.steps.append(TrainerStep(event.step, event.at_ms, event.values))
        elif event.source == "eval" and "reward" in event.values:
            self.evaluations.append(Evaluation(event.step, event.at_ms, event.values["reward"]))
        elif event.source.startswith("rollout"):
            self.engines.setdefault(event.source, Engine()).add(event)

    @property
    def tokens_generated(self) -> float:
        """As the engines count them, up to a second ago."""
        return sum(engine.tokens for engine in self.engines.values())

    @property
    def tokens_trained(self) -> int:
        return sum(
            member.n_trainable_tokens for _, group in self.view.groups_trained() for member in group.members
        )

    @property
    def ended_ms(self) -> int:
        """When the run finished; until then, when the ledger's newest record was written."""
        return self.view.finished.finished_ms if self.view.finished is not None else self.view.last_ms

    @property
    def training_s(self) -> float:
        """Seconds since the trainer began the run, without the start of the daemons before it."""
        return max(0, self.ended_ms - self.view.run.started_ms) / 1000 if self.view.run is not None else 0.0

    def first_dispatch_ms(self) -> int | None:
        """When the first task went out; None before."""
        if self._first_dispatch_ms is None:
            found = []
            for partition in range(self._topics.partitions):
                for entry in entries(self._log, self._topics.name("tasks"), partition):
                    if isinstance(entry.event, TaskDispatched):
                        found.append(entry.event.dispatched_ms or entry.timestamp_ms)
                        break
            self._first_dispatch_ms = min(found, default=None)
        return self._first_dispatch_ms

    def tokens_scored(self) -> int:
        """Tokens that the policy sampled, over all scored samples; reads the whole topic of rewards."""
        events = (
            entry.event
            for partition in range(self._topics.partitions)
            for entry in entries(self._log, self._topics.name("rewards"), partition)
        )
        scored = {event.uid: event for event in events if isinstance(event, RewardAssigned)}
        return sum(n_tokens for event in scored.values() for _, _, n_tokens in event.trainable_versions)

    def queues(self) -> dict[str, int]:
        """Records that wait before each stage, by the positions that it last hinted."""
        return {stage: waiting(self._log, self._topics, word, role=stage) for stage, word in QUEUES.items()}


# stage → the topic that it takes its work from
QUEUES = {"rollout": "tasks", "reward": "trajectories", "collector": "rewards", "trainer": "groups"}
