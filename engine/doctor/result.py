"""What a probe is asked, and what it answers."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from engine.config_secrets import REDACTED
from engine.settings import Config

Status = Literal["pass", "warn", "fail", "skip"]
SIMULATED = "no MUSA hardware: simulated"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """All that a probe may know. `Config()` stands in where no configuration was given."""

    config: Config
    has_config: bool = False
    deep: bool = False  # also what takes long, or makes a topic of its own on the broker
    address: str = ""  # of a Ray cluster; "": none
    peers: tuple[str, ...] = ()  # HOST:PORT of `millstream doctor --serve` on other nodes
    accelerator: Literal["", "cpu", "cuda", "musa"] = ""  # what the probe `accelerator` found; "": not known
    capability: tuple[int, int] | None = None  # of that accelerator
    n_devices: int = 0

    @property
    def device(self) -> str:
        """The kind of device that the configuration names; without one, what was found."""
        return self.config.model.device.partition(":")[0] if self.has_config else self.accelerator or "cpu"

    @property
    def has_other_nodes(self) -> bool:
        return bool(self.address or self.peers)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`evidence`: one line of what was seen. `remedy`: one line of what to do, where there is something to do."""

    status: Status
    evidence: str
    remedy: str = ""
    facts: dict[str, Any] = {}  # for --json, --record and later probes


def passed(evidence: str, **facts: Any) -> Result:
    return Result(status="pass", evidence=_line(evidence), facts=facts)


def warned(evidence: str, remedy: str, **facts: Any) -> Result:
    return Result(status="warn", evidence=_line(evidence), remedy=_line(remedy), facts=facts)


def failed(evidence: str, remedy: str, **facts: Any) -> Result:
    return Result(status="fail", evidence=_line(evidence), remedy=_line(remedy), facts=facts)


def skipped(why: str, **facts: Any) -> Result:
    return Result(status="skip", evidence=_line(why), facts=facts)


def without_login(text: str) -> str:
    """A URL's user and password are nobody's business."""
    return re.sub(r"//[^/@\s]*@", f"//{REDACTED}@", text)


def _line(text: str) -> str:
    """Evidence is one line, whatever an exception had to say."""
    return without_login(" ".join(text.split()))
