"""Building, checking and opening trajectory payloads.

`pack` is the one door through which samples reach the log: it refuses values that must never be trained on, with a
fixed word for the reason (the guarantee "a broken sample is never replaced by zeros" lives here). `open_payload`
is the one door out of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streams import columns
from streams.columns import LogprobFormat, VersionRun
from streams.errors import CodecError, InvalidEvent
from streams.events import Progress, TrajectoryFinished

_MINUS_INF = -0x800000  # bits of float32 -inf, as int32
LOGPROB_TOLERANCE = 1e-4  # a log-prob may be this much above 0 from rounding


class Payload(NamedTuple):
    """A trajectory's arrays, opened. P prompt tokens, L response tokens."""

    prompt_ids: NDArray[np.int32]  # [P]
    response_ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32]  # [L], 0 where the mask is False
    loss_mask: NDArray[np.bool_]  # [L]
    versions: list[VersionRun]  # over L


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
    sample: SampleData, *, progress: Progress | None = None, logprob_format: LogprobFormat = "float32"
) -> TrajectoryFinished:
    """Check a sample and make its event.

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
    logprobs = _logprobs(sample.logprobs, mask, uid)
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
        loss_mask=columns.encode_mask(mask),
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
        started_ms=sample.started_ms,
        finished_ms=sample.finished_ms,
    )


def open_payload(event: TrajectoryFinished) -> Payload:
    """Decode the columns and check that they still agree (a record can be written by anyone).

    Raises CodecError for a damaged column and InvalidEvent for values that must not be trained on.
    """
    uid = event.uid
    payload = Payload(
        columns.decode_ids(event.prompt_ids),
        columns.decode_ids(event.response_ids),
        columns.decode_logprobs(event.logprobs),
        columns.decode_mask(event.loss_mask),
        [(run[0], run[1], run[2]) for run in event.versions],
    )
    count = len(payload.response_ids)
    if count != event.n_response_tokens or len(payload.prompt_ids) != event.n_prompt_tokens:
        raise InvalidEvent(
            "length_mismatch",
            f"{len(payload.prompt_ids)}+{count} token ids, the event says "
            f"{event.n_prompt_tokens}+{event.n_response_tokens}",
            uid=uid,
        )
    _mask(payload.loss_mask, count, uid)
    _logprobs(payload.logprobs, payload.loss_mask, uid)
    _check_versions(payload.versions, count, uid)
    return payload


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


def _logprobs(values: Any, mask: NDArray[np.bool_], uid: str) -> NDArray[np.float32]:
    """Float32 [L] with zeros off the mask. Positions in messages count within the response."""
    if not isinstance(values, np.ndarray):
        values = list(values)
        for index, value in enumerate(values):
            if value is None or isinstance(value, (str, bool)):
                raise InvalidEvent("missing_logprob", f"log-prob {value!r} at index {index}", uid=uid)
    array = np.ascontiguousarray(values, dtype=np.float32)
    if array.shape != mask.shape:
        raise InvalidEvent("length_mismatch", f"log-probs {array.size}≠{len(mask)} response tokens", uid=uid)
    if not columns.is_full(mask):
        array = np.where(mask, array, np.float32(0))
    # As int32, finite negative floats lie below -inf's bits; zeros, NaN, infinities and positive floats do not.
    bits = array.view(np.int32)
    highest = np.maximum.reduce(bits)
    if highest < _MINUS_INF or (highest == 0 and not ((bits >= _MINUS_INF) & (bits < 0)).any()):
        return array
    _refuse_logprobs(array, uid)
    return np.minimum(array, np.float32(0))


def _refuse_logprobs(array: NDArray[np.float32], uid: str) -> None:
    """Name the first value that must not be trained on; returns if all are within the tolerance."""
    bad = ~np.isfinite(array)
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        raise InvalidEvent("nonfinite_logprob", f"log-prob {array[index]} at index {index}", uid=uid)
    high = array > LOGPROB_TOLERANCE
    if high.any():
        index = int(np.flatnonzero(high)[0])
        raise InvalidEvent("positive_logprob", f"log-prob {array[index]} at index {index}", uid=uid)


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
