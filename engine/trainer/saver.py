"""Saving checkpoints beside the training step.

    trainer ── snapshot of step s ──► folder written, digested, synced, renamed ──► CheckpointSaved(s) ──► prune

The step pays for a copy in memory, never for a disk; it waits here only when the checkpoint before is still being
written. A full disk costs that checkpoint, not the run: recovery then replays from an older one. Any other error
reaches the trainer at its next call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from engine.interfaces import CheckpointError

logger = logging.getLogger(__name__)

_SAY_AGAIN_S = 10.0


class Saver:
    """`save(job)` runs `job` on a thread of its own, one at a time; `flush` waits for the one that runs.

    `failed` counts the checkpoints that could not be written.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.seconds = 0.0  # that writing the last one took, beside the training
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, job: Callable[[], None], *, beat: Callable[[], None] = lambda: None) -> None:
        """`job` writes a snapshot and announces it. `beat` is called while the one before is waited for; it may
        raise, to be asked to stop."""
        self._wait(None, beat)
        self.check()
        self._thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        self._thread.start()

    def flush(self, timeout: timedelta, *, beat: Callable[[], None] = lambda: None) -> None:
        """Raises TimeoutError when the checkpoint under way is not written by then."""
        self._wait(timeout.total_seconds(), beat)
        self.check()

    def check(self) -> None:
        """Raise what ended saving, if anything did."""
        if self._error is not None:
            raise self._error

    def _wait(self, timeout_s: float | None, beat: Callable[[], None]) -> None:
        started = time.monotonic()
        say_at = _SAY_AGAIN_S
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.05)
            beat()
            waited = time.monotonic() - started
            if timeout_s is not None and waited >= timeout_s and self._thread.is_alive():
                raise TimeoutError(f"a checkpoint was not written within {timeout_s:.0f} s")
            if waited >= say_at:
                say_at += _SAY_AGAIN_S
                logger.warning("trainer has waited %.0f s for the checkpoint before to be written", waited)

    def _run(self, job: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            job()
        except CheckpointError as error:
            self.failed += 1
            logger.error(
                "trainer: no checkpoint: %s; training goes on, recovery would start from an older one", error
            )
        except BaseException as error:  # handed to the trainer, which stops with it
            logger.exception("a checkpoint could not be saved")
            self._error = error
        self.seconds = time.monotonic() - started
