"""What an export remembers: <out>/export.json, replaced as a whole after each part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from replay.export.choice import Choice
from streams.embedded.files import try_lock, write_new
from streams.errors import ConfigError

STATE_FILE = "export.json"
FORMAT = 1


class State(msgspec.Struct):
    """All kept rows stand for the records below `positions`, but for those that are `open`.

    Partitions are called `<topic word>/<partition>`.
    """

    format: int
    run: str
    to: str
    choice: dict[str, Any]
    began: str = ""  # of the run, since its name and the positions may be another's too; "": it had not begun
    positions: dict[str, int] = {}
    open: dict[str, list[int]] = {}  # offsets of records whose rows may still change
    kept: dict[str, int] = {}  # table → what opens its file again
    rows: dict[str, int] = {}  # table → rows that were kept
    finished: bool = False

    def store(self, folder: Path) -> None:
        write_new(folder / STATE_FILE, json.dumps(msgspec.to_builtins(self), indent=1).encode() + b"\n")


def open_state(folder: Path, run: str, to: str, choice: Choice, began: str) -> tuple[State, bool]:
    """The state of an earlier export of the same choice, or a fresh one; and whether there was one.

    `began` tells runs of one name apart (Outcomes.began).

    Raises ConfigError when the folder holds another export, or something else.
    """
    path = folder / STATE_FILE
    asked = State(FORMAT, run, to, msgspec.json.decode(msgspec.json.encode(choice._asdict())), began)
    if not path.exists():
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: is not empty and holds no export; name a new folder")
        asked.store(folder)
        return asked, False
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the state of an export ({error}): name a new folder") from None
    if state.format > FORMAT:
        raise ConfigError(f"{path} has format {state.format}, this version knows {FORMAT}: name a new folder")
    changes = _differences(state, asked)
    if changes:
        raise ConfigError(f"--out {folder} holds another export ({'; '.join(changes)}): name a new folder")
    if state.began not in ("", began):
        raise ConfigError(
            f"--out {folder} holds an export of another run that is called {run}, too: name a new folder"
        )
    state.began = began
    return state, True


def _differences(state: State, asked: State) -> list[str]:
    had = {"run": state.run, "--to": state.to, **state.choice}
    now = {"run": asked.run, "--to": asked.to, **asked.choice}
    return [f"{key} was {had.get(key)!r}, is {now[key]!r}" for key in now if now[key] != had.get(key)]


class Locked:
    """The folder of an export, made if it is not there, for one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"--out {self._folder}: is a file; name a folder") from None
        except OSError as error:
            raise ConfigError(f"--out {self._folder}: cannot be made ({error.strerror})") from None
        self._fd = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        if not try_lock(self._fd):
            os.close(self._fd)
            raise ConfigError(f"--out {self._folder}: another export is writing to it")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
