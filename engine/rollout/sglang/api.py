"""The words of SGLang's HTTP interface, as far as this project speaks it: typed requests, checked answers.

SGLang passes over a top-level key that it does not know (a typo loses data with a 200), so requests are structs and
never dictionaries. Answers are checked for what training relies on: `read_generated` is the guarantee that ids,
log-probs and version runs of a Generated belong together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.interfaces import Sampling
from engine.rollout.sglang.errors import BadAnswer, BadRequest, Unsupported
from engine.rollout.sglang.spans import Span, version_runs
from streams.columns import VersionRun
from streams.trajectory import LOGPROB_TOLERANCE

OLDEST = (0, 5, 21)  # the first release whose weight updates are sessions
_RID = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


# ---------------------------------------------------------------- generate: what is sent
class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that shapes the distribution is said: a server may have other defaults of its own.

    Stop strings are never sent: what they match is text, and the tokens of a cut text are not those sampled.
    """

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: list[int]
    ignore_eos: (
        bool  # without stop ids nothing ends a request but its length; SGLang would add the model's own
    )
    no_stop_trim: bool = True
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = False
    n: int = 1  # with more, the server makes up request ids, and nothing could be aborted


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = True
    logprob_start_len: int = -1  # of output tokens alone
    stream: bool = False


def generate_request(
    rid: str,
    input_ids: Sequence[int],
    sampling: Sampling,
    *,
    vocab_size: int,
    max_length: int | None,
    stream: bool,
) -> GenerateRequest:
    """A request that cannot harm the server. `max_length`: most tokens of prompt and response together, if known.

    An id outside the vocabulary ends the whole server, so this is the guarantee that none is sent. Raises BadRequest
    ("bad_token_id", "too_long", "bad_request").
    """
    if _RID.fullmatch(rid) is None:
        detail = f"needed 32 hexadecimal digits, since an abort ends every request that begins like it; got {rid!r}"
        raise BadRequest("bad_request", f"request id: {detail}")
    if sampling.max_tokens < 1 or not 0 <= sampling.temperature < float("inf"):
        raise BadRequest("bad_request", f"needed max_tokens ≥ 1 and a finite temperature ≥ 0, got {sampling}")
    ids = _checked_ids(input_ids, vocab_size, "prompt")
    if not len(ids):
        raise BadRequest("bad_request", "needed a prompt of at least one token, got none")
    if max_length is not None and len(ids) + sampling.max_tokens > max_length:
        detail = f"{len(ids)} prompt tokens and {sampling.max_tokens} new ones; the server takes {max_length} in all"
        raise BadRequest("too_long", detail)
    params = SamplingParams(
        max_new_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_token_ids=_checked_ids(sampling.stop_ids, vocab_size, "stop").tolist(),
        ignore_eos=not sampling.stop_ids,
    )
    return GenerateRequest(rid=rid, input_ids=ids.tolist(), sampling_params=params, stream=stream)


def _checked_ids(ids: Sequence[int], vocab_size: int, what: str) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise BadRequest("bad_token_id", f"needed a flat list of {what} ids, got {array.dtype} {array.shape}")
    bad = (array < 0) | (array >= vocab_size)
    if bad.any():
        at = int(bad.argmax())
        raise BadRequest(
            "bad_token_id", f"{what} id {array[at]} at index {at}: the vocabulary has {vocab_size}"
        )
    return array.astype(np.int64)


# ---------------------------------------------------------------- generate: what comes back
class Generated(NamedTuple):
    """Lengths agree: L ids, L log-probs (at the sampling temperature; at 1 for temperature 0), runs that sum to L."""

    ids: NDArray[np.int32]  # [L]; the stop id is among them
    logprobs: NDArray[np.float32]  # [L]
    versions: list[VersionRun]
    finish_reason: str  # "stop" (a stop id), "length", "aborted"
    cached_tokens: int  # of the prompt
    partial: bool  # ended by an abort: the ids so far, maybe none


class FinishReason(msgspec.Struct, frozen=True):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class WeightSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int | None = None  # not told of a request that was aborted before it began
    completion_tokens: int | None = None
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[WeightSpan] | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    output_ids: list[int]
    meta_info: MetaInfo


_ANSWERS = msgspec.json.Decoder(Answer)


def decode_answer(body: bytes) -> Answer:
    """Raises BadAnswer naming the field."""
    try:
        return _ANSWERS.decode(body)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `")
        raise BadAnswer("bad_answer", place.rstrip("`").lstrip("$.") or "answer", text) from None
    except msgspec.DecodeError as error:
        raise BadAnswer("bad_answer", "answer", f"{error}: {body[:200]!r}") from None


def read_generated(answer: Answer, request: GenerateRequest, vocab_size: int) -> Generated:
    """Everything that is checked of an answer. Raises BadAnswer."""
    meta, count = answer.meta_info, len(answer.output_ids)
    if meta.id != request.rid:
        raise BadAnswer("bad_answer", "meta_info.id", f"needed {request.rid}, got {meta.id!r}")
    finish_reason = _finish_reason(meta.finish_reason, answer.output_ids)
    partial = finish_reason == "aborted"
    most = request.sampling_params.max_new_tokens
    if count > most or (not count and not partial):
        raise BadAnswer("length_mismatch", "output_ids", f"needed 1 to {most} ids, got {count}")
    for name, needed, came in (
        ("meta_info.prompt_tokens", len(request.input_ids), meta.prompt_tokens),
        ("meta_info.completion_tokens", count, meta.completion_tokens),
    ):
        if came is not None and came != needed:
            raise BadAnswer("length_mismatch", name, f"needed {needed}, got {came}")
    ids, logprobs = _columns(answer, vocab_size)
    if meta.weight_versions is None and (count or not partial):
        raise BadAnswer("unknown_version", "meta_info.weight_versions", "the server does not tell them")
    spans = [Span(each.version, each.start, each.end) for each in meta.weight_versions or ()]
    return Generated(ids, logprobs, version_runs(spans, count), finish_reason, meta.cached_tokens, partial)


def _columns(answer: Answer, vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids [L] and log-probs [L]; messages name the first position that is wrong."""
    output_ids, entries = answer.output_ids, answer.meta_info.output_token_logprobs
    field = "meta_info.output_token_logprobs"
    if len(entries) != len(output_ids):
        raise BadAnswer("length_mismatch", field, f"log-probs {len(entries)}≠{len(output_ids)} ids")
    theirs, values = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if theirs != output_ids:
        at = next(index for index, token in enumerate(theirs) if token != output_ids[index])
        detail = f"log-prob of id {theirs[at]}, but the output id is {output_ids[at]}"
        raise BadAnswer("length_mismatch", f"{field}[{at}]", detail)
    ids = np.asarray(output_ids, dtype=np.int64)
    if (at := _first((ids < 0) | (ids >= vocab_size))) is not None:
        raise BadAnswer("bad_token_id", f"output_ids[{at}]", f"{ids[at]}: the vocabulary has {vocab_size}")
    if None in values:  # JSON has no NaN and no infinity: servers write null for them
        at = values.index(None)
        raise BadAnswer("missing_logprob", f"{field}[{at}]", f"log-prob None at index {at}")
    logprobs = np.asarray(values, dtype=np.float64)
    for reason, bad in (
        ("nonfinite_logprob", ~np.isfinite(logprobs)),
        ("positive_logprob", logprobs > LOGPROB_TOLERANCE),
    ):
        if (at := _first(bad)) is not None:
            raise BadAnswer(reason, f"{field}[{at}]", f"log-prob {logprobs[at]:g} at index {at}")
    return ids.astype(np.int32), np.minimum(logprobs, 0.0).astype(np.float32)


def _first(bad: NDArray[np.bool_]) -> int | None:
    return int(bad.argmax()) if bad.any() else None


def _finish_reason(came: FinishReason | None, ids: Sequence[int]) -> str:
    field = "meta_info.finish_reason"
    if came is None:
        raise BadAnswer("bad_answer", field, "null: the answer is not the last of its request")
    if came.type == "abort":
        return "aborted"
    if came.type == "length":
        return "length"
    if came.type != "stop":
        raise BadAnswer("bad_answer", f"{field}.type", f"needed stop, length or abort, got {came.type!r}")
    matched = came.matched
    if not isinstance(matched, int) or not ids or ids[-1] != matched:
        # a text that matched: none was asked for, and SGLang says "NaN happened" in this way
        detail = f"needed the last output id, got {matched!r} with {list(ids[-1:])}"
        raise BadAnswer("bad_answer", f"{field}.matched", detail)
    return "stop"


# ---------------------------------------------------------------- the server itself
class ServerInfo(NamedTuple):
    version: tuple[int, int, int]
    raw: Mapping[str, Any]  # all of /server_info
    tp_size: int
    dp_size: int
    model_path: str
    context_length: int | None  # most tokens of prompt and response together
    vocab_size: int | None


def read_server_info(body: bytes, vocab_size: int | None) -> ServerInfo:
    """Raises Unsupported for a release that is too old, BadAnswer for what is no /server_info."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadAnswer("bad_answer", "server_info", str(error)) from None
    text = raw.get("version")
    found = _VERSION.match(text) if isinstance(text, str) else None
    if found is None:
        raise BadAnswer("bad_answer", "server_info.version", f"needed an SGLang release, got {text!r}")
    version = (int(found[1]), int(found[2]), int(found[3]))
    if version < OLDEST:
        raise Unsupported(_too_old(version))
    path = raw.get("model_path")
    if not isinstance(path, str):
        raise BadAnswer("bad_answer", "server_info.model_path", f"needed a path, got {path!r}")
    config = _model_config(path)
    return ServerInfo(
        version=version,
        raw=raw,
        tp_size=_count(raw, "tp_size", 1) or 1,
        dp_size=_count(raw, "dp_size", 1) or 1,
        model_path=path,
        context_length=_count(raw, "context_length") or _in_config(config, "max_position_embeddings"),
        vocab_size=vocab_size or _in_config(config, "vocab_size"),
    )


def _too_old(version: tuple[int, int, int]) -> str:
    came, needed = (".".join(map(str, each)) for each in (version, OLDEST))
    why = "it does not tell which weights made which token"
    if version >= (0, 5, 19):
        why = "it takes weights without a session, and waits for a broadcast that may never come"
    return f"the server runs SGLang {came}: {why}. Needed {needed} or newer"


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    value = raw.get(key, default)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise BadAnswer("bad_answer", f"server_info.{key}", f"needed a count, got {value!r}")
    return value


def _model_config(path: str) -> Mapping[str, Any]:
    """The model's own config.json, when the server's folder can be seen from here; else nothing."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _in_config(config: Mapping[str, Any], key: str) -> int | None:
    """Models of several kinds of input keep the sizes of their language part below `text_config`."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get(key), int):
            return part[key]
    return None


def words_of(body: bytes) -> str:
    """What an error answer says, whichever of SGLang's shapes it has."""
    try:
        came = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")
    for _ in range(3):
        if not isinstance(came, dict):
            break
        came = next(
            (came[key] for key in ("message", "error", "detail") if came.get(key)), came.get("object", "")
        )
    return came if isinstance(came, str) else body.decode("utf-8", "replace")
