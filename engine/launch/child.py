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
LAST_RESORT_S = 30.0  # from that signal to SIGKILL


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Get signal `number` when process `parent` ends, however it ends. Call it from the main thread, and early.

    Done by the child itself: code between fork and exec is not safe in a supervisor that has threads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:  # it had ended before the kernel knew of our wish
        os.kill(os.getpid(), number)


def _watch(parent: int, number: int) -> None:
    """Also after the kernel's signal: a daemon that hangs must not go on beside the one that was started for it."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    if sys.platform != "linux":
        os.kill(os.getpid(), number)
    time.sleep(LAST_RESORT_S)
    if os.getpgrp() == os.getpid():  # what it has started goes too
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
