"""Kafka's jars, fetched once with Maven into a cache that is whole or not there.

The folder is filled beside its place and renamed, and it has a list of its files with their sizes: what a crash, a
full disk or a cleaner left of it is noticed and fetched again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path

from streams.broker.errors import BrokerFailed, ToolMissing
from streams.broker.folders import cache_dir, locked

KAFKA_VERSION = "4.3.1"
LIST = "jars.txt"  # one line for each jar: size in bytes, name
TIMEOUT = timedelta(minutes=10)  # 44 MB; a proxy may be slow
LINES_SHOWN = 15

_ADVICE = re.compile(r"^\[ERROR\] (\s*$|To see the full|Re-run Maven|For more information|\[Help \d+\])")

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
SLF4J = "2.0.17"
# Kafka's artifact names no logging provider (its tarball adds one): without slf4j-simple the broker logs nothing.
POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>millstream</groupId>
  <artifactId>broker</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencyManagement>
    <dependencies>
      <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-api</artifactId><version>{SLF4J}</version></dependency>
    </dependencies>
  </dependencyManagement>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>{SLF4J}</version></dependency>
  </dependencies>
</project>
"""
NEEDED = (
    f"kafka_2.13-{KAFKA_VERSION}.jar",
    f"kafka-clients-{KAFKA_VERSION}.jar",
    f"slf4j-simple-{SLF4J}.jar",
)


def kafka_dir() -> Path:
    """Where the jars of this version lie, or will."""
    return cache_dir() / f"kafka-{KAFKA_VERSION}"


def kafka_jars() -> list[Path]:
    """The jars of a broker, in a fixed order; fetched if they are not in the cache, or not whole.

    Raises ToolMissing without Maven, BrokerFailed with Maven's last lines when the download fails.
    """
    folder = kafka_dir()
    if is_whole(folder):
        return _listed(folder)
    _make(folder.parent)
    with locked(folder.parent / f".{folder.name}.lock", TIMEOUT, f"fetching Kafka {KAFKA_VERSION}"):
        if not is_whole(folder):  # another process may have fetched it in the meantime
            _fetch(folder)
    return _listed(folder)


def is_whole(folder: Path) -> bool:
    """Every jar of its list is there with its size."""
    try:
        lines = (folder / LIST).read_text(encoding="utf-8").splitlines()
        files = [(int(size), name) for size, name in (line.split(" ", 1) for line in lines)]
        return bool(files) and all((folder / name).stat().st_size == size for size, name in files)
    except (OSError, ValueError):
        return False


def _listed(folder: Path) -> list[Path]:
    lines = (folder / LIST).read_text(encoding="utf-8").splitlines()
    return [folder / line.split(" ", 1)[1] for line in lines]


def _fetch(folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        state = "is damaged" if folder.exists() else "is not there"
        raise ToolMissing(
            f"the broker needs the jars of Apache Kafka {KAFKA_VERSION}: {folder} {state}, and Maven, which fetches "
            "them, is not on PATH: install it (Debian, Ubuntu: apt-get install maven; Fedora: dnf install maven; "
            f"conda: conda install maven), or copy the folder kafka-{KAFKA_VERSION} from a machine that has it"
        )
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as draft:
        jars = Path(draft, "jars")
        _run_maven(maven, Path(draft), jars)
        absent = [name for name in NEEDED if not (jars / name).is_file()]
        if absent:
            raise BrokerFailed(f"Maven fetched Kafka {KAFKA_VERSION} without {', '.join(absent)}")
        _seal(jars)
        if folder.exists():
            folder.rename(Path(draft, "damaged"))  # removed with the draft
        jars.rename(folder)


def _run_maven(maven: str, draft: Path, jars: Path) -> None:
    pom = draft / "pom.xml"
    pom.write_text(POM, encoding="utf-8")
    # Most of Kafka's own modules are dependencies of kafka_2.13 at run time only. Without --update-snapshots, a
    # download that failed is not tried again for a day.
    options = ["--batch-mode", "--no-transfer-progress", "--update-snapshots", "-Dstyle.color=never"]
    where = ["-f", str(pom), "-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
    try:
        done = subprocess.run(
            [maven, *options, *where, COPY],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT.total_seconds(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (
            error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        )
        raise BrokerFailed(
            f"Maven had not fetched Kafka {KAFKA_VERSION} after {TIMEOUT.total_seconds():.0f} s; {_last(said)}"
        ) from None
    if done.returncode:
        raise BrokerFailed(
            f"Maven could not fetch Kafka {KAFKA_VERSION} (exit code {done.returncode}; is a mirror or proxy needed in "
            f"~/.m2/settings.xml?); {_last(done.stdout)}"
        )


def _last(said: str) -> str:
    """Maven's errors without its advice on how to run it, or its last lines where it names none."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("[ERROR] ") and not _ADVICE.search(line)]
    shown = errors[-LINES_SHOWN:] or lines[-LINES_SHOWN:]
    return "its last lines:\n  " + "\n  ".join(shown) if shown else "it printed nothing"


def _seal(jars: Path) -> None:
    """Write the list last, when every jar is on disk."""
    lines = []
    for jar in sorted(jars.glob("*.jar")):
        with jar.open("rb") as file:
            os.fsync(file.fileno())
        lines.append(f"{jar.stat().st_size} {jar.name}\n")
    with (jars / LIST).open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BrokerFailed(
            f"the cache folder {folder} cannot be made ({error.strerror}); "
            "set MILLSTREAM_CACHE to one that you may write to"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BrokerFailed(f"the cache folder {folder} is read-only; set MILLSTREAM_CACHE to another one")
