"""Answers that come in parts, put together with an account of our own.

A server tells either all tokens so far with every part, or the new ones alone (`--incremental-streaming-output`);
and an abort may cut its last part down to one token, whatever came before. `completion_tokens` counts all of them in
each case, so every part can be placed by it, and what was once received stays.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.rollout.sglang.api import Answer, decode_answer
from engine.rollout.sglang.errors import BadAnswer, Refused

_END = b"[DONE]"
_DATA = b"data:"


class Events:
    """Server-sent events out of pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that is whole by now."""
        *whole, self._rest = (self._rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in whole:
            if event.startswith(_DATA):
                yield event[len(_DATA) :].strip()


class Accumulator:
    """What one streamed request has given so far."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._entries: list[tuple[float | None, int, str | None]] = []
        self._last: Answer | None = None
        self.is_whole = False

    def add(self, data: bytes) -> None:
        """One event. Raises BadAnswer, or Refused for an error that the server found after its 200."""
        if data == _END:
            return
        _raise_error(data)
        part = decode_answer(data)
        total = part.meta_info.completion_tokens
        if total is None:
            raise BadAnswer(
                "bad_answer", "meta_info.completion_tokens", "a part of a stream does not tell it"
            )
        self._ids = _placed(self._ids, part.output_ids, total, "output_ids")
        entries = part.meta_info.output_token_logprobs
        self._entries = _placed(self._entries, entries, total, "meta_info.output_token_logprobs")
        self._last = part
        self.is_whole = part.meta_info.finish_reason is not None

    def answer(self) -> Answer:
        """All that came, in the shape of an answer in one part. Only the last part tells weight versions, so there is
        none before the request `is_whole`."""
        assert self._last is not None
        meta = msgspec.structs.replace(self._last.meta_info, output_token_logprobs=self._entries)
        return Answer(output_ids=self._ids, meta_info=meta)


def _placed(so_far: list, part: list, total: int, field: str) -> list:
    if len(part) == total:
        return part
    if len(so_far) + len(part) == total:
        return so_far + part
    if len(so_far) == total:
        return so_far
    detail = f"{len(part)} after {len(so_far)}, and completion_tokens is {total}"
    raise BadAnswer("length_mismatch", field, detail)


def _raise_error(data: bytes) -> None:
    if not data.startswith(b'{"error"'):
        return
    try:
        error = msgspec.json.decode(data)["error"]
        status, text = int(error.get("code") or 400), str(error.get("message") or error)
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
        status, text = 400, data.decode("utf-8", "replace")
    raise Refused("a streamed request", status, text)
