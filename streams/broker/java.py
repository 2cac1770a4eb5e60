"""A Java that Kafka 4 can run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from streams.broker.errors import ToolMissing

LOWEST = 17  # Kafka 4's brokers need it
HOW_TO_INSTALL = (
    "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless, or openjdk-21-jre-headless where that is "
    "what there is; conda: conda install openjdk=21), or set JAVA_HOME to one that is there"
)


class Java(NamedTuple):
    """`program` is the launcher, `version` its major version, `build` names the exact build."""

    program: Path
    version: int
    build: str


def find_java() -> Java:
    """The Java of JAVA_HOME if that will do, else the one on PATH. Raises ToolMissing, saying what was found."""
    found = []
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    for where, program in (
        ("JAVA_HOME", Path(home, "bin", "java") if home else None),
        ("PATH", Path(on_path) if on_path else None),
    ):
        if program is None:
            continue
        java = _ask(program)
        if java is not None and java.version >= LOWEST:
            return java
        said = f"is Java {java.version}" if java else "does not run"
        found.append(f"{program} (from {where}) {said}")
    raise ToolMissing(
        f"Kafka needs Java {LOWEST} or newer; {'; '.join(found) or 'there is none on PATH, and JAVA_HOME is not set'}: "
        f"{HOW_TO_INSTALL}"
    )


def _ask(program: Path) -> Java | None:
    try:
        done = subprocess.run(
            [program, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = dict(re.findall(r"^\s+(java\.[\w.]+) = (.+)$", done.stdout + done.stderr, re.MULTILINE))
    version = re.match(
        r"(?:1\.)?(\d+)", said.get("java.specification.version", "")
    )  # "1.8" was the name of 8
    if version is None:
        return None
    build = f"{said.get('java.vm.vendor', '')} {said.get('java.runtime.version', version.group(1))}"
    return Java(program, int(version.group(1)), build.strip())
