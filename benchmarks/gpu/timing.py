"""The time of one piece of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def once(work: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Seconds until the device has done it. `wait`: until all is done that was asked of the device."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began
