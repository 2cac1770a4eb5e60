"""Building, checking and opening trajectory payloads.

`pack` is the one door through which samples reach the log: it refuses values that must never be trained on, with a
fixed word for the reason (the guarantee "a broken sample is never replaced by zeros" lives here). `open_payload`
is the one door out of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from streams import columns
from streams.columns import LogprobFormat, VersionRun
from streams.errors import CodecError, InvalidEvent
from streams.events import Progress, TrajectoryFinished

_NEGATIVE = np.float32(-1)
LOGPROB_TOLERANCE = 1e-4  # a log-prob may be this much above 0 from rounding


class Payload(NamedTuple):
    """A trajectory's arrays, opened. P prompt tokens, L response tokens."""

    prompt_ids: NDArray[np.int32]  # [P]
    response_ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32]  # [L], 0 where the mask is False
    loss_mask: NDArray[np.bool_]  # [L]
    versions: list[VersionRun]  # over L
    engine: str = ""
    incarnation: str = ""  # of the engine's daemon


class SampleData(msgspec.Struct, kw_only=True):
    """One sample as a generate function hands it over; arrays or plain lists, lengths as in Payload."""

    uid: str
    group_id: str
    seq: int
    index: int
    attempt: int
    n_samples: int
    task_offset: int
    prompt_ids: Any
    response_ids: Any
    logprobs: Any
    loss_mask: Any
    versions: list[VersionRun]
    finish_reason: str
    response: str = ""
    prompt: Any = ""
    label: Any = None
    metadata: dict[str, Any] = {}
    turns: list[tuple[int, int, str]] = []
    temperature: float = 1.0
    engine: str = ""
    started_ms: int = 0
    finished_ms: int = 0


def pack(
    sample: SampleData,
    *,
    progress: Progress | None = None,
    logprob_format: LogprobFormat = "float32",
    incarnation: str = "",
) -> TrajectoryFinished:
    """Check a sample and make its event. `incarnation` is that of the daemon that had it generated.

    Raises InvalidEvent with reason `length_mismatch`, `missing_logprob`, `nonfinite_logprob`,
    `positive_logprob`, `no_tokens`, `bad_token_id`, `bad_mask` or `unknown_version`.
    """
    uid = sample.uid
    ids = _ids(sample.response_ids, "response", uid)
    prompt_ids = _ids(sample.prompt_ids, "prompt", uid)
    count = len(ids)
    if count == 0:
        raise InvalidEvent("no_tokens", "the response has no tokens", uid=uid)
    if len(prompt_ids) == 0:
        raise InvalidEvent(
            "no_tokens", "the prompt has no tokens, so its first token has no log-prob", uid=uid
        )
    mask = _mask(sample.loss_mask, count, uid)
    runs = columns.mask_runs(mask)
    logprobs = _logprobs(sample.logprobs, runs, mask, uid)
    _check_versions(sample.versions, count, uid)
    return TrajectoryFinished(
        uid=uid,
        group_id=sample.group_id,
        seq=sample.seq,
        index=sample.index,
        attempt=sample.attempt,
        n_samples=sample.n_samples,
        task_offset=sample.task_offset,
        progress=progress or {},
        prompt_ids=_column(prompt_ids, "prompt", uid),
        response_ids=_column(ids, "response", uid),
        logprobs=columns.encode_logprobs(logprobs, logprob_format),
        loss_mask=columns.encode_runs(runs),
        versions=columns.merge_runs(sample.versions),
        n_prompt_tokens=len(prompt_ids),
        n_response_tokens=count,
        finish_reason=sample.finish_reason,
        response=sample.response,
        prompt=sample.prompt,
        label=sample.label,
        metadata=sample.metadata,
        turns=sample.turns,
        temperature=sample.temperature,
        engine=sample.engine,
        incarnation=incarnation,
        started_ms=sample.started_ms,
        finished_ms=sample.finished_ms,
    )


def open_payload(event: TrajectoryFinished) -> Payload:
    """Decode the columns and check that they still agree (a record can be written by anyone).

    Raises CodecError for a damaged column and InvalidEvent for values that must not be trained on.
    """
    uid = event.uid
    prompt_ids = columns.decode_ids(event.prompt_ids)
    response_ids = columns.decode_ids(event.response_ids)
    count = len(response_ids)
    if count != event.n_response_tokens or len(prompt_ids) != event.n_prompt_tokens:
        raise InvalidEvent(
            "length_mismatch",
            f"{len(prompt_ids)}+{count} token ids, the event says "
            f"{event.n_prompt_tokens}+{event.n_response_tokens}",
            uid=uid,
        )
    runs = columns.decode_runs(event.loss_mask)
    if sum(runs) != count:
        raise InvalidEvent("length_mismatch", f"loss mask {sum(runs)}≠{count} response tokens", uid=uid)
    mask = columns.runs_to_mask(runs)
    logprobs = columns.decode_logprobs(event.logprobs)
    n_sampled = sum(runs[1::2])
    if len(logprobs) != n_sampled:
        raise InvalidEvent(
            "length_mismatch", f"log-probs {len(logprobs)}≠{n_sampled} sampled tokens", uid=uid
        )
    if columns.holds_float32(event.logprobs):  # fixed point holds nothing that is not finite and ≤ 0
        logprobs = _checked(logprobs, mask, uid)
    _check_versions(event.versions, count, uid)
    return Payload(prompt_ids, response_ids, columns.spread(logprobs, runs), mask, list(event.versions),
                   event.engine, event.incarnation)  # fmt: skip


def _ids(values: Any, what: str, uid: str) -> NDArray[np.integer]:
    """An integer array [L]; the range is checked where the column is packed."""
    try:
        array = values if isinstance(values, np.ndarray) else np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"shape {array.shape}, dtype {array.dtype}")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidEvent("bad_token_id", f"{what} token ids must be integers ({error})", uid=uid) from None
    return array


def _column(ids: NDArray[np.integer], what: str, uid: str) -> bytes:
    try:
        return columns.encode_ids(ids)
    except CodecError as error:
        raise InvalidEvent("bad_token_id", f"{what}: {error}", uid=uid) from None


def _mask(values: Any, count: int, uid: str) -> NDArray[np.bool_]:
    mask = values if isinstance(values, np.ndarray) else np.asarray(values)
    if mask.shape != (count,):
        raise InvalidEvent("length_mismatch", f"loss mask {mask.size}≠{count} response tokens", uid=uid)
    if mask.dtype == np.bool_:
        return mask
    if not ((mask == 0) | (mask == 1)).all():
        raise InvalidEvent("bad_mask", "loss mask holds values other than 0 and 1", uid=uid)
    return mask.astype(bool)


def _logprobs(values: Any, runs: Sequence[int], mask: NDArray[np.bool_], uid: str) -> NDArray[np.float32]:
    """Float32 [T], checked: those that the mask keeps. Positions in messages count within the response."""
    if not isinstance(values, np.ndarray):
        values = list(values)
        for index, value in enumerate(values):
            if value is None or isinstance(value, (str, bool)):
                raise InvalidEvent("missing_logprob", f"log-prob {value!r} at index {index}", uid=uid)
    array = np.ascontiguousarray(values, dtype=np.float32)
    if array.shape != mask.shape:
        raise InvalidEvent("length_mismatch", f"log-probs {array.size}≠{len(mask)} response tokens", uid=uid)
    return _checked(columns.keep(array, runs), mask, uid)


def _checked(kept: NDArray[np.float32], mask: NDArray[np.bool_], uid: str) -> NDArray[np.float32]:
    """Log-probs [T] that may be trained on, none above 0; `mask` [L] says where they stood.

    Columns without exact zeros are found good in one pass. One with zeros has their sign bits set when it is written
    (-0.0 = 0.0), so that opening it takes the one pass again.
    """
    if columns.all_negative(kept):
        return kept
    bad = ~np.isfinite(kept)
    if bad.any():
        _refuse("nonfinite_logprob", bad, kept, mask, uid)
    high = kept > LOGPROB_TOLERANCE
    if high.any():
        _refuse("positive_logprob", high, kept, mask, uid)
    return np.copysign(np.minimum(kept, 0), _NEGATIVE)


def _refuse(
    reason: str, bad: NDArray[np.bool_], kept: NDArray[np.float32], mask: NDArray[np.bool_], uid: str
) -> NoReturn:
    """Name the first value that must not be trained on."""
    first = int(bad.argmax())
    index = int(np.flatnonzero(mask)[first])
    raise InvalidEvent(reason, f"log-prob {kept[first]} at index {index}", uid=uid)


def _check_versions(versions: Any, count: int, uid: str) -> None:
    total = 0
    for run in versions:
        epoch, version, n_tokens = run
        if type(epoch) is not int or type(version) is not int or type(n_tokens) is not int or min(run) < 0:
            raise InvalidEvent(
                "unknown_version",
                f"version run {run!r}: needs three whole numbers ≥ 0 (epoch, version, tokens)",
                uid=uid,
            )
        total += n_tokens
    if total != count:
        raise InvalidEvent("length_mismatch", f"version runs cover {total}≠{count} response tokens", uid=uid)


def payload_digest(event: TrajectoryFinished) -> str:
    """BLAKE2b-128 (hex) of what is trained on: ids, mask, log-probs and version runs, as they lie in the event.

    Says nothing of the rest, so that a reader of a newer schema, with more fields, gets the same.
    """
    content = hashlib.blake2b(digest_size=16)
    for column in (event.prompt_ids, event.response_ids, event.loss_mask, event.logprobs):
        content.update(len(column).to_bytes(8, "little"))
        content.update(column)
    content.update(repr([tuple(run) for run in event.versions]).encode())
    return content.hexdigest()
