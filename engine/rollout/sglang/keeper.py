"""Runs one command, and ends it with everything that it started once its own standard input is closed.

    python -I keeper.py COMMAND…

Whoever starts it holds the other end of that input and never writes to it. The kernel closes it however the holder
dies, so that a server never outlives its daemon, not even one that was killed. It must lead a process group of its
own. SIGTERM is handed on to the command alone; the exit code, or the signal, is the command's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(command: Sequence[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_keeper)
    signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    threading.Thread(target=_end_all_after_the_holder, daemon=True).start()
    code = child.wait()
    if code < 0:  # die as it did, so that our parent sees the same
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _die_with_the_keeper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_all_after_the_holder() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
