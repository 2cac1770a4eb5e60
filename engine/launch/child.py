"""A daemon's side of supervision: it must not outlive its supervisor."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Get signal `number` when process `parent` ends, however it ends. Call it from the main thread, and early.

    Done by the child itself: code between fork and exec is not safe in a supervisor that has threads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:  # it had ended before the kernel knew of our wish
        os.kill(os.getpid(), number)


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), number)
