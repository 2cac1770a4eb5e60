"""Errors of the log and of what is stored in it.

    MillstreamError
    ├── ConfigError              a setting is wrong; the message names the key, the value and the fix (exit 2)
    ├── LogError                 the log could not do what was asked
    │   ├── UnknownTopic         no such topic or partition
    │   ├── TopicMismatch        the topic exists with another number of partitions
    │   ├── OffsetOutOfRange     the position lies before the first kept record, or beyond the end
    │   ├── RecordsLost          retention removed records that a stage had not read
    │   ├── RecordTooLarge       one record is over the log's limit
    │   ├── LogFull              the disk has no room; nothing was appended, the caller may try again
    │   ├── LogUnavailable       the log does not answer (broker gone, deadline passed)
    │   ├── ShareHeld            another live process holds this share of a role
    │   ├── CorruptRecord        stored bytes fail their checksum; carries the next readable offset
    │   └── LogClosed            used after close()
    ├── CodecError               a record's bytes cannot be read as an event (→ dead letter)
    │   ├── SchemaTooNew         written by a higher major schema
    │   ├── OverCap              decompressed size is over the cap
    │   └── ClaimLost            the value lies in a file beside the log, which is missing or damaged
    ├── InvalidEvent             values that must never be written (→ dead letter, its group learns of it)
    └── Fenced                   a newer epoch has taken over: this process must exit

Messages say what was needed and what came.
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(MillstreamError):
    """A configuration that cannot be used."""


class LogError(MillstreamError):
    """The log could not do what was asked."""


class UnknownTopic(LogError):
    """No such topic, or no such partition of it."""


class TopicMismatch(LogError):
    """A topic exists with another number of partitions than was asked for."""


class OffsetOutOfRange(LogError):
    """A position outside [start, end]; `start` and `end` are what the partition holds now."""

    def __init__(self, topic: str, partition: int, offset: int, start: int, end: int) -> None:
        lost = f"; {start - offset} records were removed by retention" if offset < start else ""
        super().__init__(
            f"{topic}/{partition}: offset {offset} is outside the kept range [{start}, {end}]{lost}"
        )
        self.topic, self.partition, self.offset, self.start, self.end = topic, partition, offset, start, end


class RecordsLost(LogError):
    """Retention removed records that a stage had not read: up to `count` of the offsets [`begin`, `end`)."""

    def __init__(self, message: str, topic: str, partition: int, begin: int, end: int, count: int) -> None:
        super().__init__(message)
        self.topic, self.partition = topic, partition
        self.begin, self.end, self.count = begin, end, count


class RecordTooLarge(LogError):
    """One record is over the limit of the log."""


class LogFull(LogError):
    """The disk has no room. Nothing of the append is visible; it may be tried again."""


class LogUnavailable(LogError):
    """The log does not answer within the deadline."""


class LogClosed(LogError):
    """The log was used after close()."""


class ShareHeld(LogError):
    """Another live process holds this share of the role."""


class CorruptRecord(LogError):
    """Stored bytes fail their checksum.

    `next_offset` is where reading can go on; going on loses the damaged record, so a caller must choose to.
    """

    def __init__(self, topic: str, partition: int, offset: int, next_offset: int, where: str) -> None:
        super().__init__(
            f"{topic}/{partition}: record {offset} is damaged ({where}); reading can go on at {next_offset}"
        )
        self.topic, self.partition, self.offset, self.next_offset = topic, partition, offset, next_offset


class CodecError(MillstreamError):
    """A record's bytes cannot be read as an event."""


class SchemaTooNew(CodecError):
    """The record was written by a higher major schema than this reader knows."""


class OverCap(CodecError):
    """A compressed value grows beyond the cap when it is opened."""


class ClaimLost(CodecError):
    """The value lies in a file beside the log (streams/claims.py) that is missing or damaged; names the file."""


class InvalidEvent(MillstreamError):
    """Values that must never be written; `reason` is a fixed word, `detail` the sentence."""

    def __init__(self, reason: str, detail: str, *, uid: str = "") -> None:
        super().__init__(f"{uid + ': ' if uid else ''}{reason}: {detail}")
        self.reason, self.detail, self.uid = reason, detail, uid


class Fenced(MillstreamError):
    """A newer epoch owns the run; this process must stop writing and exit non-zero."""
