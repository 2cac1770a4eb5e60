"""What a generated sample ends in: a trajectory, or a typed failure; never a reward of 0, never zeros for NaN.

sample ─► pack: values that may be trained on? ─► TrajectoryFinished
             └ refused: the whole sample to `dead`, and RolloutFailed(reason)
error with a word of that kind ─► RolloutFailed: seen before there was a sample, by the engine's client for one
                        3 of either among the last 10: the engine itself is flagged (EngineFailed "bad_samples")
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
# Reasons that say that an engine's answer, and not its absence, is what is wrong: the words of streams.trajectory.pack,
# and an answer that breaks the contract in another way.
BAD_ANSWERS = frozenset(
    {
        "bad_answer",
        "bad_token_id",
        "length_mismatch",
        "missing_logprob",
        "no_tokens",
        "nonfinite_logprob",
        "positive_logprob",
        "unknown_version",
    }
)


class Outcomes:
    """Publishes one outcome for each member. `flag(reason, detail)` is called when the engine looks broken."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        name: str,
        engine_name: str,
        incarnation: str = "",
        flag: Callable[[str, str], None],
        logprob_format: LogprobFormat = "float32",
        clock: Clock = now_ms,
    ) -> None:
        self._publisher, self._name, self._engine_name = publisher, name, engine_name
        self._incarnation, self._flag, self._clock = incarnation, flag, clock
        self._logprob_format: LogprobFormat = logprob_format
        self._recent: deque[bool] = deque(maxlen=OF_LAST)  # was it refused?
        self.samples = self.failed = self.refused = self.bad_answers = 0

    def publish(self, member: Member, sample: SampleData) -> None:
        try:
            if getattr(sample, "uid", None) != member.uid:
                raise InvalidEvent(
                    "bad_sample", f"needed the SampleData of {member.uid}, got {_named(sample)}"
                )
            event = pack(sample, logprob_format=self._logprob_format, incarnation=self._incarnation)
        except InvalidEvent as error:
            self._refuse(member, sample, error)
            return
        except Exception as error:  # user code made it: any type may be in it
            self._refuse(member, sample, InvalidEvent("bad_sample", f"{type(error).__name__}: {error}"))
            return
        self._recent.append(False)
        self.samples += 1
        self._publisher.put(member.lane, member.offset, event)

    def not_made(self, member: Member, reason: str, detail: str, *, is_of_request: bool = False) -> None:
        """There is no sample: an error of the engine or of the generate function, and nothing to look at.

        An answer that must not be used counts against the engine like a sample that is refused, unless it was the
        request that could not be right (`is_of_request`).
        """
        self.fail(member, reason, detail)
        if reason not in BAD_ANSWERS or is_of_request:
            return
        self.bad_answers += 1
        logger.error("%s: bad answer of engine %s for %s: %s: %s", self._name, self._engine_name, member.uid, reason,
                     detail)  # fmt: skip
        self._count_refusal(reason, detail)

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
        self._count_refusal(error.reason, error.detail)

    def _count_refusal(self, reason: str, detail: str) -> None:
        self._recent.append(True)
        refused, seen = sum(self._recent), len(self._recent)
        if refused >= BAD_SAMPLES:
            self._recent.clear()
            last = f"{reason}: {detail}"
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
