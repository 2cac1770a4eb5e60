"""Publishing weights beside the training step, in order of versions.

    trainer ── weights of version v, copied ──► queue (1) ──► file written, synced, renamed ──► WeightsPublished(v)
                                                                         └ and, beside all this, sent to a group

The step never waits for a disk; it waits here only when two versions are already on their way. A full disk is waited
for, since nobody can go on without the version. One that could not be written for another reason is not announced,
and the error reaches the trainer at its next call. The trainer calls `check`
every round: at a small limit it may never have another version to publish, because everybody waits for this one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import msgspec

from consumers.runner import Patience
from engine.weights.snapshots import Snapshots
from engine.weights.store import NoRoom
from streams.events import WeightsPublished

logger = logging.getLogger(__name__)

Write = Callable[[Mapping[str, Any], int, int], WeightsPublished]  # (tensors, version, step) → event
Announce = Callable[[WeightsPublished], object]  # appends it to the ledger


Beat = Callable[[], None]

_RETRY_S, _SAY_AGAIN_S = 0.5, 10.0
_SLICE_S = 0.2  # of a wait, between two beats
_CLOSE_S = 30.0  # for a version that is being written when the trainer ends


def _no_beat() -> None:
    pass


class Broadcasts(Protocol):
    """As engine/weights/sender.py: neither call waits for an engine."""

    def prepare(self, published: WeightsPublished) -> WeightsPublished: ...

    def send(self, published: WeightsPublished, tensors: Mapping[str, Any]) -> None: ...


class _Job(NamedTuple):
    tensors: Mapping[str, Any]
    version: int
    step: int
    forked_at: int


class Publisher:
    """`publish` hands a version over; `flush` waits for all; `close` ends the thread.

    `beat` is called now and then in every wait: it may raise, to be asked to stop or because another trainer has the
    run. What was not published by then is made again from the ledger. `sender`: None, engines take files alone.
    """

    def __init__(self, write: Write, announce: Announce, sender: Broadcasts | None = None) -> None:
        self._write, self._announce, self._sender = write, announce, sender
        self._snapshots = Snapshots(on_device=sender is not None)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._unfinished = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.digests: dict[int, str] = {}  # version → digest, of what was published here
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(
        self,
        tensors: Mapping[str, Any],
        version: int,
        step: int,
        *,
        forked_at: int = -1,
        beat: Beat = _no_beat,
    ) -> None:
        """These weights are copied before it returns (with a sender: on their accelerator, which waits for nothing)."""
        self.check()
        with self._lock:
            self._unfinished += 1
            self._idle.clear()
        try:
            self._hand_over(_Job(self._snapshots.take(tensors), version, step, forked_at), beat)
        except BaseException:
            self._one_less()
            raise

    def _hand_over(self, job: _Job, beat: Beat) -> None:
        patience = Patience("trainer")
        while True:
            try:
                self._jobs.put(job, timeout=_SLICE_S)
                return
            except queue.Full:
                self.check()
                beat()
                patience.waiting(lambda: f"the versions before {job.version} to be published")

    def flush(self, timeout: timedelta, *, beat: Beat = _no_beat) -> None:
        """Raises TimeoutError when not every version is published by then."""
        deadline, patience = time.monotonic() + timeout.total_seconds(), Patience("trainer")
        while not self._idle.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"weights not published within {timeout.total_seconds():.0f} s")
            beat()
            patience.waiting(lambda: "weights to be published")
        self.check()

    def close(self) -> None:
        """The version that is being written is finished; one that waits for room on the disk is given up."""
        self._closing.set()
        deadline = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._jobs.put(None, timeout=_SLICE_S)
                break
            except queue.Full:
                pass
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """Raise what ended publishing, if anything did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:  # after a failure no later version may be announced
                try:
                    self._publish(job)
                except BaseException as error:  # handed to the trainer, which stops with it
                    logger.exception("version %d could not be published", job.version)
                    self._error = error
            self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._unfinished -= 1
            if not self._unfinished:
                self._idle.set()

    def _publish(self, job: _Job) -> None:
        event = self._written(job)
        if job.forked_at >= 0:
            event = msgspec.structs.replace(event, forked_at=job.forked_at)
        if self._sender is not None:
            event = self._sender.prepare(event)
        self._announce(event)
        self.digests[job.version] = event.digest
        if self._sender is not None:
            self._sender.send(event, job.tensors)

    def _written(self, job: _Job) -> WeightsPublished:
        """Raises NoRoom only when the trainer ends meanwhile."""
        said_at = -_SAY_AGAIN_S
        while True:
            try:
                return self._write(job.tensors, job.version, job.step)
            except NoRoom as error:
                if self._closing.is_set():
                    raise
                if time.monotonic() - said_at >= _SAY_AGAIN_S:
                    said_at = time.monotonic()
                    logger.error("trainer: paused, version %d cannot be published: %s", job.version, error)
                self._closing.wait(_RETRY_S)
