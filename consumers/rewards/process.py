"""A worker process as its slot sees it: started with two pipes and the board, written to, read from, asked where it
is, and killed with all that it started. What runs inside is in serving.py.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

import msgspec

from consumers.rewards.code_tests import MARK, kill_group
from consumers.rewards.load import load_reward
from consumers.rewards.serving import BOOTSTRAP, serve
from consumers.rewards.wire import KEPT, NOBODY, REVOKED, START_S, TRACE_AT, Report, framed

# Of a worker's stack, what is not the user's: serving.py, load.py, the loop, the bootstrap.
_OUR_FRAMES = (serve.__code__.co_filename, load_reward.__code__.co_filename, "/asyncio/", "<string>")

_reports = msgspec.msgpack.Decoder(Report)


class Worker:
    """A worker process seen from its slot: two pipes and the board."""

    def __init__(self, setup: bytes) -> None:
        self.mark = secrets.token_hex(16)
        self._board = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the worker
        self._board.truncate(TRACE_AT)
        os.pwrite(self._board.fileno(), struct.pack("<qqq", NOBODY, 0, NOBODY), 0)
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._code: int | None = None
        fds = [child_in, child_out, self._board.fileno()]
        try:
            # no preexec_fn, so the parent's threads do no harm
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path), *map(str, [*fds, os.getpid()])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what user code prints must not reach the pipes
                pass_fds=fds,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._to)
            os.close(self._from)
            self._board.close()
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._from, selectors.EVENT_READ)
        self.send(setup, START_S)

    def send(self, frame: bytes, timeout_s: float) -> bool:
        """Write one frame. False: the worker has ended, or does not read."""
        data = memoryview(framed(frame))
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as room:
            room.register(self._to, selectors.EVENT_WRITE)
            while data:
                left = end - time.monotonic()
                if left <= 0 or not room.select(left):
                    return False
                try:
                    data = data[os.write(self._to, data) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    return False
        return True

    def wait(self, also: int | None, seconds: float | None) -> None:
        """Until the worker has written or ended, `also` is readable, or the time is over."""
        if also is not None and also not in self._selector.get_map():
            self._selector.register(also, selectors.EVENT_READ)
        self._selector.select(seconds)

    def reports(self) -> list[Report]:
        """Whole reports that have come. Raises EOFError when there is none and the worker has ended."""
        has_ended = False
        while True:
            try:
                chunk = os.read(self._from, 1 << 18)
            except BlockingIOError:
                break
            if not chunk:
                has_ended = True
                break
            self._buffer += chunk
            if len(chunk) < 1 << 16:
                break
        found, at = [], 0
        while len(self._buffer) - at >= 4:
            (size,) = struct.unpack_from("<I", self._buffer, at)
            if len(self._buffer) - at - 4 < size:
                break
            try:
                found.append(_reports.decode(self._buffer[at + 4 : at + 4 + size]))
            except msgspec.DecodeError:
                raise EOFError from None  # user code wrote to our pipe: nothing from this worker counts any more
            at += 4 + size
        del self._buffer[:at]
        if has_ended and not found:
            raise EOFError
        return found

    def turn(self) -> int:
        """The call whose code runs now, or −1."""
        return struct.unpack("<q", os.pread(self._board.fileno(), 8, 0))[0]

    def revoke(self, message: int, kept: int) -> None:
        """What the worker has not begun of this message and those before it, it will pass over, but for one call."""
        os.pwrite(self._board.fileno(), struct.pack("<q", kept), KEPT.start)
        os.pwrite(
            self._board.fileno(), struct.pack("<q", message), REVOKED.start
        )  # last: then both are there

    def stack(self) -> str:
        """Where the worker's main thread is, innermost first, for people; empty if it does not say."""
        try:
            os.kill(self.process.pid, signal.SIGUSR1)  # faulthandler answers from C, also while a regex runs
        except ProcessLookupError:
            return ""
        end = time.monotonic() + 0.2
        text = before = b""
        while time.monotonic() < end and not (text and text == before):
            time.sleep(0.01)
            text, before = os.pread(self._board.fileno(), 4096, TRACE_AT), text
        lines = [
            line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.startswith("  File")
        ]
        frames = [line.replace('File "', "").replace('", line ', ":") for line in lines]
        theirs = [frame for frame in frames if not any(each in frame for each in _OUR_FRAMES)]
        return f"; it was in {' ← '.join(theirs[:4])}" if theirs else ""

    def kill(self) -> int:
        """End the worker and everything it started; its exit code. May be called again, and from any thread."""
        with self._lock:
            if self._code is None:
                kill_group(self.process.pid, self.mark)
                self._code = self.process.wait()
            return self._code

    def close(self) -> None:
        """Give the descriptors back. In the slot's thread only, after kill(): another may still use them."""
        self._selector.close()
        os.close(self._to)
        os.close(self._from)
        self._board.close()


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
