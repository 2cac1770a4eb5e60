"""Every version that a run published, and where its weights can be had from now.

    ledger ─► WeightsPublished, valid or void ─┐
    weights/ ─► full file, or delta and chain ─┼─► Version(…, source = file │ chain │ replay │ gone)
    checkpoints/, trajectories ─► steps again ─┤
    fleet ─► who serves it now ────────────────┘

Looks at names, heads and digests that files say they have; their bytes are verified by `millstream verify`, and by
`materialize` as it copies. Reads only.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from engine.trainer.checkpoint import MANIFEST
from engine.weights import chain
from engine.weights import tensors as files
from engine.weights.delta import SUFFIX
from engine.weights.membership import ENDED
from engine.weights.tensors import WeightsError
from replay.ledger import LedgerEntry, read_ledger
from replay.records import entries
from streams.errors import ConfigError, MillstreamError
from streams.events import (
    CheckpointSaved,
    EngineFailed,
    EngineJoined,
    EngineLeft,
    EngineReady,
    WeightsPublished,
)
from streams.log import EventLog
from streams.topics import Topics

Source = Literal["file", "chain", "replay", "gone"]

LATEST = "latest"


class Version(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    version: int
    step: int  # the weights are those after it
    kind: str  # "full", "delta"
    base_version: int | None
    nbytes: int  # as it was published: of a delta, of the delta
    digest: str
    published_ms: int
    state: Literal[
        "valid", "void", "abandoned"
    ]  # void: its trainer had been replaced; abandoned: a later epoch forked
    source: Source
    detail: str  # which file, how many deltas or steps; why there is none
    served_by: list[str]  # engines that hold it now

    @property
    def name(self) -> str:
        return f"e{self.epoch}-v{self.version}"


class Found(NamedTuple):
    """One version that was asked for."""

    published: WeightsPublished
    is_void: bool
    warning: str  # why it is not the run's own any more; "" if it is


class Origin(NamedTuple):
    """Where steps would begin that make a version again."""

    step: int  # of the checkpoint; 0: the initial weights
    n_steps: int
    checkpoint: str  # its folder; "": none

    @property
    def start(self) -> str:
        return f"the checkpoint of step {self.step}" if self.checkpoint else "the initial weights"

    @property
    def words(self) -> str:
        return made_from(self.start, self.n_steps)


class Publications:
    """What the ledger says of versions, read once; `list` and `origin` look at the run's files and payloads too."""

    def __init__(self, log: EventLog, topics: Topics, run_dir: Path) -> None:
        self._log, self._topics, self._run_dir = log, topics, run_dir
        ledger, self.view = read_ledger(log, topics)
        self.records = _newest_of_each(ledger)
        self._lineage = self.view.lineage()

    def find(self, text: str) -> Found:
        """The version called `7`, `e3-v7` or `latest`. A void or abandoned one must be called by its full name.

        Raises ConfigError for something else, and MillstreamError for a version that was not published.
        """
        own = [event for event, is_void in self.records if not is_void and not self._is_abandoned(event)]
        if not self.records:
            raise MillstreamError(f"run {self._topics.run} has published no weights yet")
        if text == LATEST:
            if not own:
                raise MillstreamError(
                    f"run {self._topics.run} has no valid version; see: millstream weights … list"
                )
            return Found(own[-1], False, "")
        epoch, version = _parse(text)
        matching = [
            each for each in self.records if each[0].version == version and epoch in (None, each[0].epoch)
        ]
        if not matching:
            raise MillstreamError(f"{text}: {self._unknown(version)}")
        if epoch is None:
            candidates = [event for event in own if event.version == version]
            if candidates:
                return Found(candidates[-1], False, "")
            event, is_void = matching[-1]
            name = f"e{event.epoch}-v{event.version}"
            raise MillstreamError(f"{text}: {self._why_not(event, is_void)}; {name} names it all the same")
        event, is_void = matching[-1]
        return Found(event, is_void, self._why_not(event, is_void))

    def _is_abandoned(self, event: WeightsPublished) -> bool:
        return self._lineage.effective(event.epoch, event.version) != event.version

    def _why_not(self, event: WeightsPublished, is_void: bool) -> str:
        name = f"version {event.version} of epoch {event.epoch}"
        if is_void:
            return f"{name} is void: that trainer had been replaced when it published it"
        if self._is_abandoned(event):
            fork = self._lineage.effective(event.epoch, event.version)
            return f"{name} is abandoned: a later trainer went on from version {fork} and made other weights"
        return ""

    def _unknown(self, version: int) -> str:
        """What there is instead."""
        names = {
            event.version: f"e{event.epoch}-v{event.version}" for event, _ in self.records
        }  # the newest of each
        if version in names:
            same = [f"e{event.epoch}-v{version}" for event, _ in self.records if event.version == version]
            return f"run {self._topics.run} published version {version} only as {', '.join(same)}"
        known = sorted(names)
        place = bisect.bisect(known, version)
        nearest = " and ".join(names[number] for number in known[max(0, place - 1) : place + 1])
        return (
            f"run {self._topics.run} published no such version; it has {known[0]} to {known[-1]}, nearest: {nearest} "
            "(weights.update_weights_interval says how many steps lie between two)"
        )

    # -- where it can be had
    def list(self) -> list[Version]:
        """Each published version in ledger order."""
        serving = _serving(self._log, self._topics)
        return [self._version(event, is_void, serving) for event, is_void in self.records]

    def _version(self, event: WeightsPublished, is_void: bool, serving: dict[str, EngineReady]) -> Version:
        source, detail = self._source(event, is_void)
        holders = [
            engine
            for engine, ready in serving.items()
            if (ready.epoch, ready.version, ready.digest) == (event.epoch, event.version, event.digest)
        ]
        return Version(
            epoch=event.epoch,
            version=event.version,
            step=event.step,
            kind=event.kind,
            base_version=event.base_version if event.kind == "delta" else None,
            nbytes=event.nbytes,
            digest=event.digest,
            published_ms=event.published_ms,
            state="void" if is_void else "abandoned" if self._is_abandoned(event) else "valid",
            source=source,
            detail=detail,
            served_by=sorted(holders),
        )

    def _source(self, event: WeightsPublished, is_void: bool) -> tuple[Source, str]:
        stored = stored_file(event, self._run_dir)
        problem = "its file was removed"
        if stored is not None:
            try:
                return _from_file(event, stored)
            except WeightsError as error:
                problem = str(error)
        origin = self.origin(event, is_void)
        if isinstance(origin, str):
            return "gone", f"{problem}; {origin}"
        return "replay", origin.words

    def origin(self, event: WeightsPublished, is_void: bool) -> Origin | str:
        """Where a version can be made again from, or why it cannot."""
        if is_void:
            return "its steps are no record of this run"
        saved = [each for each in self._checkpoints if each.step <= event.step]
        step, path = (saved[-1].step, saved[-1].path) if saved else (0, "")
        begin = Origin(step, event.step - step, path)
        lost = self._lost_steps[bisect.bisect_right(self._lost_steps, step) :]
        if lost and lost[0] <= event.step:
            return f"from {begin.start} on, samples of step {lost[0]} are no longer in the log"
        return begin

    @cached_property
    def _checkpoints(self) -> list[CheckpointSaved]:
        """Those whose manifest is the recorded one, by step."""
        there = [
            each for each in self.view.checkpoints if _says(self._run_dir / each.path / MANIFEST, each.digest)
        ]
        return sorted(there, key=lambda each: each.step)

    @cached_property
    def _lost_steps(self) -> list[int]:
        """Steps that cannot be made again, since retention took samples of theirs."""
        topic, starts = self._topics.name("trajectories"), {}
        for partition in range(self._topics.partitions):
            starts[partition] = self._log.start(topic, partition)
        return sorted(
            {
                cut.step
                for cut, group in self.view.groups_trained()
                if any(member.trajectory_offset < starts[group.partition] for member in group.members)
            }
        )


def stored_file(event: WeightsPublished, run_dir: Path) -> Path | None:
    """The version's file: the full one where there is one, else its delta; None: neither is there."""
    uri = event.uris.get("disk", "").removeprefix("file://")
    if not uri:
        return None
    path = run_dir / uri
    for candidate in (path.with_suffix(chain.FULL_SUFFIX), path):
        if candidate.is_file():
            return candidate
    return None


def _from_file(event: WeightsPublished, path: Path) -> tuple[Source, str]:
    """Raises WeightsError when the file, or one of its chain, is not what the ledger says."""
    found = chain.resolve(path)
    said = (
        found.deltas[-1].head.digest
        if found.deltas
        else files.read_metadata(path).get("digest", event.digest)
    )
    if said != event.digest:
        raise WeightsError(
            f"{path.name} holds other weights: digest {said[:16]}, published {event.digest[:16]}"
        )
    if path.suffix != SUFFIX:
        return "file", path.name
    assert found.full is not None
    return "chain", f"{found.full.name} and {counted(len(found.deltas), 'delta')}"


def made_from(start: str, n_steps: int) -> str:
    return f"{start} and {counted(n_steps, 'step')} made again" if n_steps else start


def counted(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _says(manifest: Path, digest: str) -> bool:
    """Whether a checkpoint's manifest is the one that was recorded. Its files are verified when it is used."""
    try:
        return json.loads(manifest.read_bytes()).get("digest") == digest
    except (OSError, ValueError, AttributeError):
        return False


def _newest_of_each(ledger: Sequence[LedgerEntry]) -> list[tuple[WeightsPublished, bool]]:
    """(record, is it void) of each (epoch, version), in ledger order; the last record of one counts."""
    found: dict[tuple[int, int], tuple[WeightsPublished, bool]] = {}
    for entry in ledger:
        if isinstance(entry.event, WeightsPublished):
            key = entry.event.epoch, entry.event.version
            if entry.void and key in found and not found[key][1]:
                continue  # a copy that landed too late takes nothing from the valid one
            found.pop(key, None)
            found[key] = entry.event, entry.void
    return list(found.values())


def _serving(log: EventLog, topics: Topics) -> dict[str, EngineReady]:
    """Engine → what it said it serves, of engines that said nothing since that ends that."""
    serving: dict[str, EngineReady] = {}
    for entry in entries(log, topics.name("fleet"), 0):
        event = entry.event
        if isinstance(event, EngineReady):
            serving[event.engine] = event
        elif isinstance(event, (EngineLeft, EngineJoined)) or (
            isinstance(event, EngineFailed) and event.reason in ENDED
        ):
            serving.pop(event.engine, None)
    return serving


def _parse(text: str) -> tuple[int | None, int]:
    named = chain.parse_name(f"{text}{chain.FULL_SUFFIX}")
    if named is not None:
        return named.epoch, named.version
    number = text.removeprefix("v")
    if not (number.isascii() and number.isdecimal()):
        raise ConfigError(
            f"version {text!r}: a version is a number, as in 7, an epoch and a number, as in e3-v7, or latest"
        )
    return None, int(number)
