"""What a data folder says of its broker, and which folders are refused.

DATA/
  broker.json         what it is: Kafka's version, cluster id, ports; written before anything else
  server.properties   written anew at each start
  kafka/              Kafka's own data, formatted beside and renamed
  broker.log, .1      what the process said, of this start and the one before
  broker.pid          the process, while there is one
  tmp/                native libraries that the process unpacks
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from streams.broker.folders import write_whole
from streams.broker.properties import NODE_ID
from streams.errors import ConfigError

STATE = "broker.json"
LOCK = "lock"
FOREIGN_SHOWN = 5


class State(msgspec.Struct):
    """`ports` has one for each listener, by its name."""

    kafka: str
    cluster_id: str
    ports: dict[str, int]


def load(data: Path) -> State | None:
    """What is known of the folder; None for one that is empty or not there. Raises ConfigError for any other."""
    try:
        return msgspec.json.decode((data / STATE).read_bytes(), type=State)
    except FileNotFoundError:
        return _refuse_foreign(data)
    except NotADirectoryError:
        raise ConfigError(f"{data} is a file; name a folder for the broker's data") from None
    except PermissionError as error:
        raise ConfigError(f"{error.filename} may not be read by this user; name another folder") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{data / STATE} does not describe a broker of ours ({error}); name another folder"
        ) from error


def save(data: Path, state: State) -> None:
    write_whole(data / STATE, msgspec.json.format(msgspec.json.encode(state), indent=2).decode() + "\n")


def check(data: Path, state: State, version: str) -> None:
    """Raise ConfigError if Kafka of `version` must not work on the folder, or Kafka's own data is not `state`'s."""
    if _numbers(state.kafka) > _numbers(version):
        raise ConfigError(
            f"{data} was last used by Kafka {state.kafka}, this is {version}, and Kafka's data has no way back; "
            "name another folder, or use the newer millstream"
        )
    kept = meta_properties(data / "kafka")
    ours = {"version": "1", "cluster.id": state.cluster_id, "node.id": str(NODE_ID)}
    differing = [
        f"{key} is {kept.get(key)}, not {value}" for key, value in ours.items() if kept.get(key) != value
    ]
    if kept and differing:
        raise ConfigError(
            f"{data / 'kafka'} is of another cluster or format: {', '.join(differing)}; name another folder"
        )


def make_folder(data: Path) -> None:
    """Raises ConfigError."""
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{data} cannot be made ({error.strerror}); name a folder that you may write to"
        ) from error
    if not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{data} is not yours to write to; name another folder")


def meta_properties(folder: Path) -> dict[str, str]:
    """What Kafka itself wrote down about its data; empty where nothing was formatted."""
    try:
        lines = (folder / "meta.properties").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def _refuse_foreign(data: Path) -> None:
    try:
        names = sorted(
            set(os.listdir(data))
            - {LOCK}
            - {name for name in os.listdir(data) if name.startswith(f".{STATE}")}
        )
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{data}: {error.strerror}; name another folder for the broker's data") from error
    if not names:
        return
    cluster = meta_properties(data).get("cluster.id")
    if cluster:
        raise ConfigError(
            f"{data} is the data of another Kafka (cluster {cluster}), not made here; name another folder"
        )
    shown = ", ".join(names[:FOREIGN_SHOWN]) + (", …" if len(names) > FOREIGN_SHOWN else "")
    raise ConfigError(
        f"{data} holds other things ({shown}); name an empty or new folder for the broker's data"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
