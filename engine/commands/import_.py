"""`millstream import`: a slice becomes a run directory again."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.commands import common
from engine.commands.rundir import IMPORTED_FILE
from streams.errors import ConfigError

if TYPE_CHECKING:
    from replay.slices.format import Manifest
    from replay.slices.restore import Restored

NAME = "import"
HELP = "open a slice of a run's log as a run directory"
DESCRIPTION = """Make DIR from a slice that `millstream export --slice` wrote: an embedded log in which each
record has its old offset, the configuration, and the files that came along. Every command that reads
then works on DIR; what is not in the slice counts as removed. A slice that is damaged, cut short, or
of a newer version is refused, and so is a DIR that exists."""
EXAMPLE = """  millstream import odd.mslice runs/odd
  millstream verify runs/odd"""

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a slice")
    parser.add_argument("dir", metavar="DIR", help="a directory to be made")


def execute(args: argparse.Namespace) -> int:
    common.setup_logging("warning")
    run_dir = Path(args.dir)
    manifest, restored = import_slice(Path(args.file), run_dir)
    sys.stdout.write(_report(manifest, restored, run_dir))
    return 0


def import_slice(path: Path, run_dir: Path) -> tuple[Manifest, Restored]:
    """Make the run directory; it is there whole or not at all.

    Raises SliceError for a bad slice, ConfigError for a directory that exists or cannot be made.
    """
    from engine.config import CONFIG_FILE, dump_toml, load_config
    from replay.slices.format import SliceReader
    from replay.slices.restore import restore

    if run_dir.exists():
        raise ConfigError(f"{run_dir} exists: name a directory to be made")
    draft = run_dir.with_name(f".{run_dir.name}.{os.getpid()}.new")
    with SliceReader(path) as reader:
        try:
            draft.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{run_dir} cannot be made: {error.strerror}") from error
        try:
            (draft / CONFIG_FILE).write_text(reader.manifest.config, encoding="utf-8")
            _check_config(path, reader.manifest, draft)
            restored = restore(path, reader, draft)
            (draft / IMPORTED_FILE).write_bytes(_note(reader.manifest))
            draft.rename(run_dir)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    effective = dump_toml(load_config(run_dir, environ={}))
    (run_dir / f".{CONFIG_FILE}.new").write_text(effective, encoding="utf-8")
    (run_dir / f".{CONFIG_FILE}.new").replace(run_dir / CONFIG_FILE)
    return reader.manifest, restored


def _check_config(path: Path, manifest: Manifest, draft: Path) -> None:
    """Before the rest: the configuration of another version may not be readable.

    And whoever wrote it: no command that is given the directory may end at another log than the one in it.
    """
    from engine.config import load_config
    from replay.slices.restore import LOG_FOLDER

    try:
        config = load_config(draft, environ={})
    except ConfigError as error:
        raise ConfigError(f"{path}: this version cannot read its configuration: {error}") from error
    wanted = {
        "log.url": (config.log.url, f"file://{draft.resolve() / LOG_FOLDER}"),
        "run.name": (config.run.name, manifest.run),
        "log.partitions": (config.log.partitions, manifest.partitions),
    }
    for key, (says, own) in wanted.items():
        if says != own:
            raise ConfigError(
                f"{path}: its configuration has {key} = {says!r}, which is not that of its own log"
            )


def _note(manifest: Manifest) -> bytes:
    """The manifest without the configuration, which has a file of its own."""
    said = msgspec.to_builtins(manifest)
    del said["config"]
    return msgspec.json.format(msgspec.json.encode(said)) + b"\n"


def _report(manifest: Manifest, restored: Restored, run_dir: Path) -> str:
    made = datetime.fromtimestamp(manifest.made_ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = [
        f"{run_dir}: run {manifest.run!r} from a {manifest.source} log, sliced {made}: {manifest.chosen}",
        f"{restored.n_records} records, {restored.n_files} files",
    ]
    if restored.n_fillers:
        lines.append(
            f"{restored.n_fillers} records between them are not in the slice and stand as 'left_out'"
        )
    return "\n".join(lines) + "\n"
