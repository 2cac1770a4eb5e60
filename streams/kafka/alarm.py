"""A thread that sleeps until it is time for something, and can be told that it is time sooner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LONGEST_S = 3600.0


class Alarm:
    """Lifecycle: made → wake_at (starts the thread) … → stop. All methods are called with `lock` held.

    When it is time, `ring()` is called without the lock, on the alarm's thread. It calls `sleep_until`, unless it
    wants to be called again at once.
    """

    def __init__(self, lock: threading.Lock, ring: Callable[[], None], *, name: str) -> None:
        self._ring = ring
        self._name = name
        self._sooner = threading.Condition(lock)
        self._wakes_at = 0.0  # time.monotonic
        self._thread: threading.Thread | None = None
        self._stopped = False

    def wake_at(self, due: float) -> None:
        """Ring by then, if not sooner."""
        if self._thread is None:
            self._wakes_at = due
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        elif due < self._wakes_at:
            self._wakes_at = due
            self._sooner.notify()

    def sleep_until(self, due: float) -> None:
        """Do not ring before, unless somebody asks for it."""
        self._wakes_at = due

    def stop(self) -> None:
        self._stopped = True
        self._sooner.notify()

    def _run(self) -> None:
        while True:
            with self._sooner:
                now = time.monotonic()
                if now < self._wakes_at:
                    self._sooner.wait(min(self._wakes_at - now, _LONGEST_S))
                if self._stopped:
                    return
                if time.monotonic() < self._wakes_at:
                    continue  # only to sleep for less long
            self._ring()
