"""What ids look like, and the sentence for one that is not there.

group    0-3          data epoch and row of the dataset
sample   0-3/1/0      group, index, attempt; 0-3/1 = the attempt that counts
step     12
version  7, e3-v7     number; epoch and number
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from replay.lives.run import RunFacts
from replay.lives.seek import id_of, records_where
from streams.errors import ConfigError, MillstreamError
from streams.events import BatchCut, Closing

KINDS = ("group", "sample", "step", "version")
FORMS = {
    "group": "a group is data epoch and row, as in 0-3",
    "sample": "a sample is group, index and attempt, as in 0-3/1/0 (0-3/1: the attempt that counts)",
    "step": "a step is a number from 1 on",
    "version": "a version is a number from 0 on, or epoch and number, as in e3-v7",
}


class NotFound(MillstreamError):
    """The id is well formed and the run has no such thing."""


class SampleId(NamedTuple):
    group_id: str
    index: int
    attempt: int | None  # None: the one that counts


class VersionId(NamedTuple):
    epoch: int | None
    version: int


def malformed(kind: str, text: str) -> ConfigError:
    others = [f"`show … {other} {text}`" for other, fits in _FITS.items() if other != kind and fits(text)]
    hint = f"; did you mean {' or '.join(others)}?" if others else ""
    return ConfigError(f"{kind} {text!r}: {FORMS[kind]}{hint}")


_FITS = {
    "group": lambda text: re.fullmatch(r"\d+-\d+", text) is not None,
    "sample": lambda text: re.fullmatch(r"[^/]+/\d+(/\d+)?", text) is not None,
    "step": lambda text: re.fullmatch(r"\d+", text) is not None,
    "version": lambda text: re.fullmatch(r"(e\d+-)?v\d+", text) is not None,
}


def parse_group(text: str) -> str:
    """A group id is whatever has no slash: an importer may have named groups otherwise. Raises ConfigError."""
    if not text or "/" in text or _FITS["version"](text) or _FITS["step"](text):
        raise malformed("group", text)
    return text


def parse_sample(text: str) -> SampleId:
    """Raises ConfigError."""
    found = re.fullmatch(r"(.+?)/(\d+)(?:/(\d+))?", text)
    if found is None or "/" in found[1]:
        raise malformed("sample", text)
    return SampleId(found[1], int(found[2]), int(found[3]) if found[3] is not None else None)


def parse_step(text: str) -> int:
    """Raises ConfigError."""
    if re.fullmatch(r"\d+", text) is None:
        raise malformed("step", text)
    return int(text)


def parse_version(text: str) -> VersionId:
    """`7`, `v7` or `e3-v7`. Raises ConfigError.

    >>> parse_version("e3-v7")
    VersionId(epoch=3, version=7)
    """
    found = re.fullmatch(r"(?:e(\d+)-)?v?(\d+)", text)
    if found is None:
        raise malformed("version", text)
    return VersionId(int(found[1]) if found[1] is not None else None, int(found[2]))


# ---------------------------------------------------------------- not there
def no_group(run: RunFacts, group_id: str) -> NotFound:
    known = known_groups(run)
    if not known:
        return _not_found(run, f"no group {group_id!r}: run {run.topics.run} has dispatched none yet")
    close = ", ".join(nearest(group_id, known))
    what = f"no group {group_id!r} in run {run.topics.run}; nearest: {close} ({len(known)} are known; {FORMS['group']})"
    return _not_found(run, what)


def no_sample(text: str, known: Sequence[str]) -> NotFound:
    group_id = text.partition("/")[0]
    return NotFound(f"no sample {text!r}; group {group_id} has {listed(known)}")


def no_step(run: RunFacts, step: int) -> NotFound:
    steps = sorted({cut.event.step for cut in run.view.cuts})
    if not steps:
        return _not_found(run, f"no step {step}: run {run.topics.run} has cut no batch yet")
    return _not_found(run, f"no step {step}: run {run.topics.run} has steps {steps[0]} to {steps[-1]}")


def no_version(run: RunFacts, asked: VersionId) -> NotFound:
    known = sorted({(each.epoch, each.version) for each in run.view.versions})
    numbers = [version for _, version in known]
    what = f"no version {asked.version}: run {run.topics.run} has published none yet"
    if asked.version in numbers and asked.epoch is not None:
        found = ", ".join(f"e{epoch}-v{version}" for epoch, version in known if version == asked.version)
        what = f"no version e{asked.epoch}-v{asked.version}: version {asked.version} exists as {found}"
    elif numbers:
        has = f"has published versions {min(numbers)} to {max(numbers)}"
        what = f"no version {asked.version}: run {run.topics.run} {has}"
    return _not_found(run, what)


def _not_found(run: RunFacts, what: str) -> NotFound:
    """With what keeps the run's ledger from being read, since that may be why."""
    return NotFound("; ".join([what, *run.notes]))


def known_groups(run: RunFacts) -> set[str]:
    """Ids of all groups that the ledger or `tasks` name."""
    found: set[str] = set()
    for entry in run.ledger:
        if isinstance(entry.event, BatchCut):
            found.update(group.group_id for group in entry.event.groups)
        if isinstance(entry.event, Closing):
            found.update(drop.group_id for drop in entry.event.drops)
    for partition in range(run.topics.partitions):
        topic = run.topics.name("tasks")
        found.update(id_of(each) for each in records_where(run.log, topic, partition, lambda _: True))
    return found - {""}


def nearest(group_id: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The closest ids by row within the same data epoch, else by data epoch.

    >>> nearest("0-9", ["0-1", "0-7", "1-9", "0-2"])
    ['0-7', '0-2', '0-1']
    """
    wanted = _numbers(group_id)
    if wanted is None:
        return sorted(heapq.nsmallest(most, known))
    return heapq.nsmallest(most, known, key=lambda each: (*_distance(wanted, _numbers(each)), each))


def listed(names: Sequence[str], most: int = 8) -> str:
    more = f" … {names[-1]}" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "none that is known"


def _numbers(group_id: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+)-(\d+)", group_id)
    return (int(found[1]), int(found[2])) if found else None


def _distance(wanted: tuple[int, int], each: tuple[int, int] | None) -> tuple[int, int]:
    if each is None:
        return (1 << 62, 1 << 62)
    return abs(wanted[0] - each[0]), abs(wanted[1] - each[1])
