"""What a generated sample ends in: a trajectory, or a typed failure; never a reward of 0, never zeros for NaN.

sample ─► pack: values that may be trained on? ─► TrajectoryFinished
             └ refused: the whole sample to `dead`, and RolloutFailed(reason)
                        3 of the last 10: the engine itself is flagged (EngineFailed "bad_samples")
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from consumers.runner import Clock, now_ms
from engine.rollout.intake import Member
from engine.rollout.publisher import Publisher
from streams.columns import LogprobFormat
from streams.errors import InvalidEvent
from streams.events import DeadLetter, RolloutFailed
from streams.trajectory import SampleData, pack

logger = logging.getLogger(__name__)

BAD_SAMPLES, OF_LAST = 3, 10  # this many refusals among an engine's last samples flag it


class Outcomes:
    """Publishes one outcome for each member. `flag(reason, detail)` is called when the engine looks broken."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        name: str,
        engine_name: str,
        flag: Callable[[str, str], None],
        logprob_format: LogprobFormat = "float32",
        clock: Clock = now_ms,
    ) -> None:
        self._publisher, self._name, self._engine_name = publisher, name, engine_name
        self._flag, self._clock = flag, clock
        self._logprob_format: LogprobFormat = logprob_format
        self._recent: deque[bool] = deque(maxlen=OF_LAST)  # was it refused?
        self.samples = self.failed = self.refused = 0

    def publish(self, member: Member, sample: SampleData) -> None:
        try:
            if getattr(sample, "uid", None) != member.uid:
                raise InvalidEvent(
                    "bad_sample", f"needed the SampleData of {member.uid}, got {_named(sample)}"
                )
            event = pack(sample, logprob_format=self._logprob_format)
        except InvalidEvent as error:
            self._refuse(member, sample, error)
            return
        except Exception as error:  # user code made it: any type may be in it
            self._refuse(member, sample, InvalidEvent("bad_sample", f"{type(error).__name__}: {error}"))
            return
        self._recent.append(False)
        self.samples += 1
        self._publisher.put(member.lane, member.offset, event)

    def fail(self, member: Member, reason: str, detail: str, letter: DeadLetter | None = None) -> None:
        self.failed += 1
        event = RolloutFailed(
            uid=member.uid,
            group_id=member.task.group_id,
            seq=member.seq,
            index=member.index,
            attempt=member.task.attempt,
            n_samples=member.task.n_samples,
            task_offset=member.task_offset,
            reason=reason,
            detail=detail[:2000],
            engine=self._engine_name,
        )
        self._publisher.put(member.lane, member.offset, event, letter)

    def _refuse(self, member: Member, sample: Any, error: InvalidEvent) -> None:
        letter = DeadLetter(
            topic=self._publisher.topics.name("trajectories"),
            partition=member.lane.partition,
            offset=-1,  # it never came to have one
            raw=encode_raw(sample),
            stage=self._name,
            reason=error.reason,
            detail=str(error)[:2000],
            at_ms=self._clock(),
        )
        logger.error("%s: refused %s of engine %s: %s: %s", self._name, member.uid, self._engine_name, error.reason,
                     error.detail)  # fmt: skip
        self.refused += 1
        self.fail(member, error.reason, error.detail, letter)
        self._recent.append(True)
        refused, seen = sum(self._recent), len(self._recent)
        if refused >= BAD_SAMPLES:
            self._recent.clear()
            last = f"{error.reason}: {error.detail}"
            self._flag(
                "bad_samples", f"{refused} of the last {seen} samples were refused, the last one for {last}"
            )


def encode_raw(sample: Any) -> bytes:
    """Everything of a refused sample as MessagePack; arrays as lists, NaN kept, what has no form as its repr."""
    try:
        return msgspec.msgpack.encode(sample, enc_hook=_plain)
    except Exception:  # keys that are no keys, integers beyond 64 bits, cycles
        return msgspec.msgpack.encode(repr(sample)[: 1 << 20])


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else repr(value)


def _named(sample: Any) -> str:
    return getattr(sample, "uid", None) or f"a {type(sample).__name__}"
