"""Which trainer owns a run: the one of the newest epoch in the ledger.

RunStarted (first ever, its data settings are those of every later trainer) ─► EpochStarted = "mine from here on"
a newer epoch of somebody else ─► Fenced; of this very trainer (its own append, landed twice) ─► LogUnavailable
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable

from consumers.ledger import Ledger
from consumers.runner import Clock
from engine.trainer.resume import History
from engine.trainer.settings import LoopSettings
from streams.errors import ConfigError, Fenced, LogUnavailable
from streams.events import EpochStarted, Event, RunStarted
from streams.topics import Topics

logger = logging.getLogger(__name__)


class Ownership:
    """`begin` an epoch, then `check` before and after whatever is written. `append`: to the ledger, patiently.

    The guarantee "a trainer that was taken over writes to no effect, and ends" lives here and in the fold of the
    ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        topics: Topics,
        settings: LoopSettings,
        append: Callable[[Event], int],
        clock: Clock,
    ) -> None:
        self.epoch = -1
        self._ledger, self._topics, self._settings = ledger, topics, settings
        self._append, self._clock = append, clock
        self._incarnation = f"trainer-{os.getpid()}-{secrets.token_hex(4)} on {socket.gethostname()}"

    def begin(self, history: History) -> History:
        """Begin an epoch; returns the valid records up to its own. `history`: those that were read before."""
        history = [*history, *self._ledger.catch_up()]
        if self._ledger.run is None:
            self._append(self._run_started())
            history += self._ledger.catch_up()
        assert self._ledger.run is not None
        self._check_manifest(self._ledger.run)  # another trainer's may have been first
        started = EpochStarted(producer=self._incarnation, started_ms=self._clock(), limit=self._ledger.limit)
        self.epoch = self._append(started)
        history += self._ledger.catch_up()
        if self._ledger.owner == self._incarnation:  # appended twice: the first was not acknowledged in time
            self.epoch = self._ledger.epoch
        self.check(at_step=0)
        logger.info("trainer: epoch %d of run %s", self.epoch, self._settings.run)
        return history

    def check(self, at_step: int) -> None:
        """As of what was read of the ledger. Raises Fenced, or LogUnavailable when this trainer must start again."""
        if self._ledger.epoch <= self.epoch:
            return
        if self._ledger.owner == self._incarnation:
            # What was written since then under the older epoch is void, so nothing of this state can be kept.
            raise LogUnavailable(
                f"a copy of this trainer's own EpochStarted (epoch {self.epoch}) landed late, as epoch "
                f"{self._ledger.epoch}: the log had not acknowledged the first in time; the trainer starts again"
            )
        raise Fenced(
            f"epoch {self._ledger.epoch} ({self._ledger.owner}) has taken over run {self._settings.run}; this trainer "
            f"(epoch {self.epoch}) stops at step {at_step}"
        )

    def _run_started(self) -> RunStarted:
        settings = self._settings
        return RunStarted(
            run=settings.run,
            config_fingerprint=settings.config_fingerprint,
            partitions=self._topics.partitions,
            rollout_batch_size=settings.rollout_batch_size,
            n_samples_per_prompt=settings.n_samples_per_prompt,
            seed=settings.seed,
            started_ms=self._clock(),
        )

    def _check_manifest(self, run: RunStarted) -> None:
        """Another configuration could not replay this ledger to its weights."""
        if run.partitions != self._topics.partitions:
            raise ConfigError(
                f"log.partitions = {self._topics.partitions}: run {run.run} was started with {run.partitions}, "
                "fixed for its life; set it back, or choose another run.name"
            )
        if run.config_fingerprint != self._settings.config_fingerprint:
            raise ConfigError(
                f"the log holds run {run.run} of another configuration (fingerprint {run.config_fingerprint[:12]}…, "
                f"this one is {self._settings.config_fingerprint[:12]}…); set the run's data settings back, or choose "
                "another run.name or log.url"
            )
