"""What every log checks before it stores anything, so that all of them refuse the same things."""

from __future__ import annotations

import re
from collections.abc import Sequence

from streams.errors import LogError, RecordTooLarge, UnknownTopic
from streams.log import Headers, NewRecord

# The two limits on the size of a record, value and headers as they are stored. Everything on a record's way follows
# from them: the broker's max.message.bytes and the clients' request and fetch sizes from the first, what the codec
# writes and opens from the second (streams/codec.py).
MAX_RECORD_BYTES = (
    8 << 20
)  # in the log itself (log.max_record_bytes); what is larger goes to a file (streams/claims.py)
MAX_CLAIM_BYTES = 256 << 20  # in such a file (log.max_claim_bytes); what is larger is refused
MOST_CLAIM_BYTES = 1 << 30  # that log.max_claim_bytes may be set to
MAX_TIMESTAMP_MS = 1 << 62
_NAMED = 16  # topics of an error's text: those of two runs

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")  # fits Kafka's topic names and a file name


def check_name(kind: str, name: str) -> None:
    """Topic and group names become Kafka names and file names, so they are held to what both allow."""
    if not _NAME.fullmatch(name):
        raise LogError(
            f"{kind} name {name!r}: needs 1 to 200 letters, digits, '.', '_' or '-', "
            "and to start with a letter, a digit or '_'"
        )


def check_partitions(topic: str, partitions: int) -> None:
    if not 1 <= partitions <= 10_000:
        raise LogError(f"topic {topic!r}: partitions must be 1 to 10000, got {partitions}")


def check_records(
    records: Sequence[NewRecord], max_record_bytes: int, setting: str = "log.max_record_bytes"
) -> None:
    """Refuse what could not be stored or read back, before anything is queued.

    Raises RecordTooLarge, which names `setting`, the one that would let it pass; LogError for a call without records,
    TypeError and ValueError for wrong values.
    """
    if not records:
        raise LogError("an append needs at least one record, got none")
    for index, (value, headers, timestamp_ms) in enumerate(records):
        size, known = len(value), type(value) is bytes
        for name, content in headers:
            size += len(name) + len(content)
            known = known and type(name) is str and type(content) is bytes
        if not known:
            raise TypeError(f"record {index} of the append: value and headers must be bytes, names str")
        if size > max_record_bytes:
            raise RecordTooLarge(
                f"record {index} of the append{_identity(headers)} is {size} bytes; the limit of this log is "
                f"{max_record_bytes} ({setting})"
            )
        if timestamp_ms is not None and abs(timestamp_ms) > MAX_TIMESTAMP_MS:
            raise ValueError(f"record {index} of the append: timestamp_ms is {timestamp_ms}")


def _identity(headers: Headers) -> str:
    """What a record is, from the headers that an event's record has (streams/codec.py); nothing for others."""
    known = dict(headers)
    words = [known[name].decode("utf-8", "replace") for name in ("type", "id") if known.get(name)]
    return f" ({' '.join(words)})" if words else ""


def no_such(topic: str, partition: int, topics: dict[str, int]) -> UnknownTopic:
    """The error for a topic or partition that does not exist; says what does: of many topics, those of the same run
    first, and not all."""
    if topic in topics:
        return UnknownTopic(f"topic {topic!r} has partitions 0 to {topics[topic] - 1}, not {partition}")
    run = topic.rpartition(".")[0]
    known = sorted(topics, key=lambda name: (name.rpartition(".")[0] != run, name))
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    return UnknownTopic(f"no topic {topic!r}; this log has: {', '.join(known[:_NAMED]) or 'none'}{more}")
