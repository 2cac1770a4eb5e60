"""What of a topic is wanted: records that name a group or a sample, or that meet a condition.

A pick says first whether a record may match, by what its place and headers show, so that only those are decoded.
"""

from __future__ import annotations

from typing import Protocol

from replay.fields import text_of
from replay.records import Entry
from replay.where import Where
from streams.events import BatchCut, Closing, DeadLetter, GroupCompleted

_LONGEST_ID = 120  # bytes; the codec cuts the header there


class Pick(Protocol):
    """Whether an entry is wanted."""

    @property
    def needs_event(self) -> bool:
        """Whether `matches` must be asked with a decoded entry."""
        ...

    def may_match(self, entry: Entry) -> bool:
        """False only when a sealed entry cannot match once it is decoded."""
        ...

    def matches(self, entry: Entry) -> bool: ...


class Meets:
    """Entries that meet a condition."""

    def __init__(self, where: Where) -> None:
        self.where, self.needs_event = where, where.needs_event

    def may_match(self, entry: Entry) -> bool:
        return True

    def matches(self, entry: Entry) -> bool:
        return self.where.matches(entry)


class NamesGroup:
    """Entries that name a group."""

    needs_event = True

    def __init__(self, group_id: str) -> None:
        self._group_id, self._group = group_id, group_id.encode()

    def may_match(self, entry: Entry) -> bool:
        return _may_name(entry, self._group)

    def matches(self, entry: Entry) -> bool:
        return self._group_id in _groups_in(entry)


class NamesSample:
    """Entries that name a sample."""

    needs_event = True

    def __init__(self, uid: str) -> None:
        self._uid, self._group = uid, uid.split("/")[0].encode()

    def may_match(self, entry: Entry) -> bool:
        return _may_name(entry, self._group)

    def matches(self, entry: Entry) -> bool:
        return self._uid in _uids_in(entry)


def _may_name(entry: Entry, group: bytes) -> bool:
    """Whether the header `id`, a uid or a group id, names this group, or says nothing."""
    raw = entry.record.header("id") if entry.record is not None else None
    if raw is None or len(raw) >= _LONGEST_ID:
        return True
    return raw.startswith(group) and raw[len(group) : len(group) + 1] in (b"", b"/")


def _groups_in(entry: Entry) -> set[str]:
    """Ids of the groups that an entry names."""
    event = entry.event
    found = {_field(entry, "group_id")}
    if isinstance(event, BatchCut):
        found.update(group.group_id for group in event.groups)
    if isinstance(event, Closing):
        found.update(drop.group_id for drop in event.drops)
    if isinstance(event, DeadLetter):
        found.add(_id_of_letter(event).split("/")[0])
    return found


def _uids_in(entry: Entry) -> set[str]:
    """Ids of the samples that an entry names."""
    event = entry.event
    found = {_field(entry, "uid")}
    if isinstance(event, GroupCompleted):
        found.update(member.uid for member in event.members)
    if isinstance(event, BatchCut):
        found.update(member.uid for group in event.groups for member in group.members)
    if isinstance(event, DeadLetter):
        found.add(_id_of_letter(event))
    return found


def _field(entry: Entry, name: str) -> str:
    if entry.unknown is not None:
        return str(entry.unknown.fields.get(name, ""))
    return getattr(entry.event, name, "")


def _id_of_letter(letter: DeadLetter) -> str:
    """The uid or group id that the refused record carried in its headers."""
    return text_of(dict(letter.raw_headers).get("id", b""))
