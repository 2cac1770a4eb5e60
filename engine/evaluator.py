"""Held-out reward of published versions, measured beside the run by its own engine.

    ledger ─► WeightsPublished(v) ─► due? ─► file pinned ─► engine.update ─► n episodes ─► reward ─► Metrics("eval", v)

Due is every k-th version and each of the last `final` ones. The evaluator is often slower than the trainer, and the
store keeps few versions: a due one is pinned (hard links, no copy) as soon as its record is read. A version whose
file is gone all the same is reported as missing, never passed over in silence.

It ends when RunFinished was read and every due version is evaluated or reported.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from consumers.dataset import BadRow, Dataset
from consumers.ledger import Ledger
from consumers.rewards.types import NotScored, Outcome, RewardInput, Scored
from consumers.runner import Clock, Patience, Stop, now_ms
from engine.interfaces import EngineError, RolloutEngine, Sampling
from engine.rollout.generate import Aborted, Generate, GenerateContext
from engine.rollout.loading import FATAL, Locate
from engine.rollout.text import TokenText
from engine.weights.chain import link_chain
from engine.weights.tensors import WeightsError
from streams import codec
from streams.events import Metrics, TaskDispatched, WeightsPublished
from streams.log import EventLog, TopicPartition
from streams.topics import Topics
from streams.trajectory import SampleData

logger = logging.getLogger(__name__)

SOURCE = "eval"
_POLL = timedelta(milliseconds=200)


class Scoring(Protocol):
    """What is used of a consumers.rewards.pool.ScoringPool."""

    def submit(self, inputs: list[RewardInput]) -> Future[list[Outcome]]: ...


class _Due(NamedTuple):
    published: WeightsPublished
    path: Path | None  # pinned; None: it was gone already


class Evaluator:
    """`Evaluator(log, topics, engine, generate, dataset, scoring, locate=…, pins=…).run(stop)`.

    `dataset`: held-out rows, used from the first one on and again from there, until there are `episodes`.
    `every`: versions between two evaluations; `final`: this many last versions are evaluated as well, at the end, or
    as they come if `total_steps` (the version that the run will end with) is given. `pins`: a folder on the file
    system of the weights.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Topics,
        engine: RolloutEngine,
        generate: Generate,
        dataset: Dataset,
        scoring: Scoring,
        *,
        locate: Locate,
        pins: Path,
        sampling: Sampling,
        options: Mapping[str, Any] | None = None,
        episodes: int = 256,
        every: int = 20,
        final: int = 1,
        total_steps: int | None = None,
        max_concurrency: int = 256,
        apply_chat_template: bool = False,
        seed: int = 0,
        clock: Clock = now_ms,
    ) -> None:
        self.log, self.topics, self.engine, self.generate = log, topics, engine, generate
        self.dataset, self.scoring, self.locate, self.pins = dataset, scoring, locate, pins
        self.sampling, self.options = sampling, dict(options or {})
        self.episodes, self.every, self.final, self.total_steps = episodes, every, final, total_steps
        self.max_concurrency, self.seed, self.clock = max_concurrency, seed, clock
        self.text = TokenText(engine.tokenizer, apply_chat_template=apply_chat_template)
        self.ledger = Ledger(log, topics)
        self.results: dict[int, float] = {}  # version → mean reward
        self._due: OrderedDict[int, _Due] = OrderedDict()
        self._newest: OrderedDict[int, _Due] = (
            OrderedDict()
        )  # of the last ones, those that are not due anyway
        self._last: list[int] = []  # the newest `final` versions, ascending
        self._reported: set[tuple[int, str]] = set()  # (version, digest)
        self._patience = Patience("evaluator")

    # -- life
    def run(self, stop: Stop) -> int:
        return asyncio.run(self._main(stop))

    async def _main(self, stop: Stop) -> int:
        loop = asyncio.get_running_loop()
        self.pins.mkdir(parents=True, exist_ok=True)
        try:
            while not stop():
                self._read_ledger()
                if self._due:
                    _, due = self._due.popitem(last=False)
                    if not await self._evaluate_unless(stop, due):
                        return 0
                    self._patience.reset()
                elif self.ledger.finished is not None:
                    logger.info("evaluator: the run is finished and every due version is evaluated")
                    return 0
                else:
                    self._patience.waiting(lambda: f"a version that is due (every {self.every})")
                    place = TopicPartition(self.topics.name("ledger"), 0)
                    await loop.run_in_executor(None, self.log.wait, {place: self.ledger.position}, _POLL)
            return 0
        except EngineError as error:
            if error.reason not in FATAL:
                raise
            logger.error("evaluator: its engine serves no longer: %s", error)
            return 1
        finally:
            await self.engine.close()
            for due in (*self._due.values(), *self._newest.values()):
                self._unpin(due)

    async def _evaluate_unless(self, stop: Stop, due: _Due) -> bool:
        """Evaluate, and give up within a moment when asked to stop; False: stopped."""
        work = asyncio.ensure_future(self._evaluate(due))
        while not work.done():
            await asyncio.wait([work], timeout=0.1)
            if not work.done() and stop():
                work.cancel()
                await asyncio.wait([work], timeout=1.0)
                return False
        work.result()
        return True

    # -- what is due
    def _read_ledger(self) -> None:
        for _, event in self.ledger.catch_up():
            if isinstance(event, WeightsPublished):
                self._offer(event)
        if self.ledger.finished is not None:
            for version, due in self._newest.items():
                self._due[version] = due
            self._newest.clear()

    def _offer(self, published: WeightsPublished) -> None:
        """A newer epoch's version takes the place of its namesake."""
        version = published.version
        for waiting in (self._due, self._newest):
            if version in waiting:
                self._unpin(waiting.pop(version))
        self._last = (
            [each for each in self._last if each < version][-self.final + 1 :] if self.final > 1 else []
        )
        self._last.append(version)
        for old in [each for each in self._newest if each not in self._last]:
            self._unpin(self._newest.pop(old))
        if (version, published.digest) in self._reported:
            return
        is_last = self.total_steps is not None and self.total_steps - self.final < version <= self.total_steps
        if version % self.every == 0 or is_last:
            self._due[version] = self._pin(published)
        elif self.final:  # due if the run ends now: its data may end at any step
            self._newest[version] = self._pin(published)

    def _pin(self, published: WeightsPublished) -> _Due:
        """Links of its files, all that its chain has, in a folder of their own: retention may take them elsewhere."""
        pin = self.pins / f"e{published.epoch}-v{published.version}"
        try:
            path = self.locate(published)
            shutil.rmtree(pin, ignore_errors=True)
            try:
                return _Due(published, link_chain(path, pin))
            except FileNotFoundError:
                return _Due(published, None)
            except OSError:  # another file system: then it is used where it lies, as long as it does
                return _Due(published, path)
        except (EngineError, WeightsError) as error:
            logger.warning("evaluator: %s", error)
            return _Due(published, None)

    def _unpin(self, due: _Due) -> None:
        if due.path is not None and due.path.parent.parent == self.pins:
            shutil.rmtree(due.path.parent, ignore_errors=True)

    # -- one version
    async def _evaluate(self, due: _Due) -> None:
        published, began = due.published, time.monotonic()
        self._reported.add((published.version, published.digest))
        if due.path is None:
            self._missing(published, "its file was removed by retention before it could be pinned")
            return
        try:
            await self.engine.update(published, due.path)
        except EngineError as error:
            if error.reason in FATAL:
                raise
            self._missing(published, str(error))
            return
        finally:
            self._unpin(due)
        samples = await self._play(published)
        outcomes = await self._score([each for each in samples if each is not None])
        rewards = [outcome.reward for outcome in outcomes if isinstance(outcome, Scored)]
        self._tell(published.version, self._values(samples, rewards, time.monotonic() - began))
        if rewards:
            self.results[published.version] = float(np.mean(rewards))
            logger.info(
                "evaluator: version %d: reward %.4f over %d episodes",
                published.version,
                self.results[published.version],
                len(rewards),
            )

    def _values(
        self, samples: list[SampleData | None], rewards: list[float], seconds: float
    ) -> dict[str, float]:
        """Episodes without a verdict are counted, and are no part of the mean."""
        made = [each for each in samples if each is not None]
        values = {
            "episodes": float(len(rewards)),
            "failed": float(self.episodes - len(rewards)),
            "eval_s": seconds,
            "response_tokens_mean": float(np.mean([len(each.response_ids) for each in made]))
            if made
            else 0.0,
        }
        if rewards:
            values["reward"] = float(np.mean(rewards))
            values["reward_std"] = float(np.std(rewards))
        return values

    def _missing(self, published: WeightsPublished, why: str) -> None:
        logger.warning("evaluator: version %d cannot be evaluated: %s", published.version, why)
        self._tell(published.version, {"episodes": 0.0, "weights_missing": 1.0})

    def _tell(self, version: int, values: dict[str, float]) -> None:
        metrics = Metrics(source=SOURCE, step=version, values=values, at_ms=self.clock())
        self.log.append(self.topics.name("metrics"), 0, [codec.encode(metrics, producer="evaluator")])

    async def _play(self, published: WeightsPublished) -> list[SampleData | None]:
        slots = asyncio.Semaphore(self.max_concurrency)

        async def play(number: int) -> SampleData | None:
            async with slots:
                return await self._episode(published, number)

        return list(await asyncio.gather(*(play(number) for number in range(self.episodes))))

    async def _episode(self, published: WeightsPublished, number: int) -> SampleData | None:
        task = self._task(number)
        if task is None:
            return None
        context = GenerateContext(
            engine=self.engine,
            text=self.text,
            sampling=self.sampling,
            request_id=f"eval/{published.epoch}/{published.version}/{number}",
            options=self.options,
            seed=self.seed,
            clock=self.clock,
        )
        try:
            return await self.generate(context, task, 0)
        except EngineError as error:
            if error.reason in FATAL:
                raise
            logger.warning("evaluator: episode %d: %s", number, error)
        except Aborted:
            logger.warning("evaluator: episode %d was aborted", number)
        except Exception as error:  # user code: it fails this episode, not the evaluation
            logger.warning("evaluator: episode %d: %s: %s", number, type(error).__name__, error)
        return None

    def _task(self, number: int) -> TaskDispatched | None:
        index = number % len(self.dataset)
        row = self.dataset.row(index)
        if isinstance(row, BadRow):
            logger.warning("evaluator: %s: %s", row.reason, row.detail)
            return None
        return TaskDispatched(
            group_id=f"eval-{number}",
            seq=number,
            data_epoch=number // len(self.dataset),
            row=index,
            n_samples=1,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
        )

    async def _score(self, samples: list[SampleData]) -> list[Outcome]:
        if not samples:
            return []
        inputs = [reward_input(each) for each in samples]
        outcomes = await asyncio.wrap_future(await _submitted(self.scoring.submit, inputs))
        for outcome in outcomes:
            if isinstance(outcome, NotScored):
                logger.warning("evaluator: no verdict: %s: %s", outcome.reason, outcome.detail)
        return outcomes


async def _submitted(
    submit: Callable[[list[RewardInput]], Future[list[Outcome]]], inputs: list[RewardInput]
) -> Future[list[Outcome]]:
    """On a thread of its own: a pool without workers scores inside submit()."""
    return await asyncio.get_running_loop().run_in_executor(None, submit, inputs)


def reward_input(sample: SampleData) -> RewardInput:
    ids = np.asarray(sample.response_ids, np.int32)
    return RewardInput(
        uid=sample.uid,
        group_id=sample.group_id,
        index=sample.index,
        prompt=sample.prompt,
        response=sample.response,
        response_ids=ids,
        label=sample.label,
        metadata=sample.metadata,
        finish_reason=sample.finish_reason,
        response_length=len(ids),
    )
