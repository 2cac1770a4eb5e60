"""One probe, in this process.

    runner ──► python -m engine.doctor.child MODULE:FUNCTION PARENT (Request on stdin) ──► NUL and a Result on stdout

What imported modules write to stdout stands before the NUL.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback

import msgspec

from engine.doctor.result import Request, Result, failed
from engine.launch.child import die_with_parent
from streams.errors import MillstreamError


def main(argv: list[str]) -> int:
    place, parent = argv
    die_with_parent(int(parent), signal.SIGKILL)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    result = _answer(place, request)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\0" + msgspec.json.encode(result))
    sys.stdout.buffer.flush()
    os._exit(0)  # threads and exit handlers of what was probed are no longer of interest


def _answer(place: str, request: Request) -> Result:
    module, _, function = place.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(request)
    except MillstreamError as error:
        return failed(str(error), f"docs/doctor.md says what {place.rpartition(':')[2]} needs")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return failed(
            f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})",
            "the probe itself met this error; it is what a daemon would meet at the same place",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
