"""Opening a slice: a fresh embedded log in which every record lies at its old offset."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from replay.slices.filler import filler
from replay.slices.format import FilePiece, Manifest, SlicedRecord, SliceError, SliceReader
from streams.embedded.begun import create_topic_at
from streams.errors import LogError
from streams.events import SCHEMA_MAJOR
from streams.log import EventLog, NewRecord
from streams.open import open_log
from streams.topics import ALL_TOPICS, DATA_TOPICS, Topics

LOG_FOLDER, CLAIMS_FOLDER = "log", "claims"  # in a run directory
APPEND_BYTES = 4 << 20


class Restored(NamedTuple):
    n_records: int
    n_fillers: int
    n_files: int


def restore(slice_path: Path, reader: SliceReader, run_dir: Path) -> Restored:
    """Put log and files of the slice into `run_dir`, which is fresh and empty.

    Raises SliceError for a slice that is damaged, not whole, of a newer schema, or that says nonsense.
    """
    manifest = reader.manifest
    topics = Topics(manifest.run, manifest.partitions)
    _check(slice_path, manifest, topics)
    try:
        for word, stretches in manifest.topics.items():
            create_topic_at(run_dir / LOG_FOLDER, topics.name(word), [start for start, _ in stretches])
    except LogError as error:
        raise SliceError(f"{slice_path}: {error}") from error
    url = (run_dir / LOG_FOLDER).resolve().as_uri()
    with open_log(url, claims=run_dir / CLAIMS_FOLDER, fsync="never") as log:
        filling = _Filling(slice_path, log, topics, manifest)
        files: set[str] = set()
        for item in reader.content():
            if isinstance(item, FilePiece):
                _write_piece(slice_path, run_dir, item, is_first=item.name not in files)
                files.add(item.name)
            else:
                filling.add(item)
        filling.finish()
    return Restored(filling.n_records, filling.n_fillers, len(files))


def _check(path: Path, manifest: Manifest, topics: Topics) -> None:
    major = manifest.schema.partition(".")[0]
    if not major.isdecimal() or int(major) > SCHEMA_MAJOR:
        raise SliceError(
            f"{path} holds events of schema {manifest.schema}, this version knows {SCHEMA_MAJOR}.x: update millstream"
        )
    for word, stretches in manifest.topics.items():
        if word not in ALL_TOPICS:
            raise SliceError(f"{path}: its manifest gives {word!r}, which is no topic")
        count = manifest.partitions if word in DATA_TOPICS else 1
        if len(stretches) != count or any(not 0 <= start <= end for start, end in stretches):
            raise SliceError(
                f"{path}: its manifest gives {word} the stretches {stretches}, for {count} partitions"
            )


class _Filling:
    """Appends records in their places; what lies between them is filled."""

    def __init__(self, path: Path, log: EventLog, topics: Topics, manifest: Manifest) -> None:
        self._path, self._log, self._topics = path, log, topics
        self._next = {
            (word, partition): start
            for word, stretches in manifest.topics.items()
            for partition, (start, _) in enumerate(stretches)
        }
        self._ends = {
            (word, partition): end
            for word, stretches in manifest.topics.items()
            for partition, (_, end) in enumerate(stretches)
        }
        self._newest_ms: dict[tuple[str, int], int] = {}
        self._waiting: list[NewRecord] = []
        self._bytes = 0
        self._place = ("", 0)  # of those that wait
        self.n_records = self.n_fillers = 0

    def add(self, record: SlicedRecord) -> None:
        place = (record.word, record.partition)
        if place not in self._next or not self._next[place] <= record.offset < self._ends[place]:
            raise SliceError(
                f"{self._path}: record {record.word}/{record.partition}:{record.offset} is out of its place"
            )
        if place != self._place:
            self._flush()
            self._place = place
        self._fill(place, record.offset, record.timestamp_ms)
        self._put(NewRecord(record.value, tuple(record.headers), record.timestamp_ms))
        self._next[place] = record.offset + 1
        self._newest_ms[place] = record.timestamp_ms
        self.n_records += 1

    def _fill(self, place: tuple[str, int], end: int, timestamp_ms: int) -> None:
        for _ in range(self._next[place], end):
            self._put(filler(self._newest_ms.get(place, timestamp_ms)))
            self.n_fillers += 1

    def _put(self, record: NewRecord) -> None:
        self._waiting.append(record)
        self._bytes += len(record.value)
        if self._bytes >= APPEND_BYTES or len(self._waiting) >= 1000:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            word, partition = self._place
            self._log.append(self._topics.name(word), partition, self._waiting)
        self._waiting, self._bytes = [], 0

    def finish(self) -> None:
        """Fill the ends, so that references to what was left out there are told from references to nothing."""
        self._flush()
        for place, end in self._ends.items():
            self._place = place
            self._fill(place, end, 0)
            self._flush()


def _write_piece(path: Path, run_dir: Path, piece: FilePiece, *, is_first: bool) -> None:
    """Only below the run directory, and never over the log or the configuration."""
    parts = PurePosixPath(piece.name).parts
    if (
        not parts
        or PurePosixPath(piece.name).is_absolute()
        or ".." in parts
        or parts[0].casefold() == LOG_FOLDER  # some file systems know no case
        or len(parts) < 2
        or "\0" in piece.name
    ):
        raise SliceError(f"{path} names a file {piece.name!r} that does not belong into a run directory")
    file = run_dir.joinpath(*parts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb" if is_first else "ab") as opened:
            opened.write(piece.content)
    except OSError as error:
        raise SliceError(f"{path}: its file {piece.name!r} cannot be written: {error.strerror}") from error
