"""A real Kafka for tests: fixtures, imported by tests/conftest.py.

    kafka        address ("127.0.0.1:PORT") of one broker for the whole session, started when the first test asks
    own_kafka    a node of the test's own, running: it may be killed, paused, stopped and started again
    make_kafka   makes such nodes with listeners, properties and users; each is started by the test
    prefix       names nobody else uses on a shared broker begin with it

MILLSTREAM_TEST_KAFKA=host:port makes `kafka` that broker. Without Java, Maven or a Kafka client these tests are
skipped with the reason; with MILLSTREAM_REQUIRE_KAFKA=1 they fail with it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from streams.broker.errors import BrokerFailed, ToolMissing
from streams.broker.node import Node
from streams.broker.prepare import prepare

NEEDING = {"kafka", "own_kafka", "make_kafka"}
QUICK = ("-XX:TieredStopAtLevel=1",)  # tests start many and run none for long
ROOT = Path(__file__).parents[2]

# Ends the brokers of a session that was killed: its standard input closes when pytest is gone, however it went.
GUARD = """
import sys
from pathlib import Path
from streams.broker.node import Node
sys.stdin.buffer.read()
for state in Path(sys.argv[1]).glob("*/broker.json"):
    Node(state.parent).kill()
"""


def no_client() -> str | None:
    if importlib.util.find_spec("kafka") is None:
        return "kafka-python is not installed (pip install 'millstream[kafka]')"
    return None


@cache
def why_not() -> str | None:
    """Why no broker can be had here; None when one can. The first call may download it."""
    if no_client():
        return no_client()
    try:
        prepare()
    except (ToolMissing, BrokerFailed) as error:
        return str(error)
    return None


def prepare_for(items: list[pytest.Item]) -> None:
    """Download before the first test, if one needs it: a test's deadline is not meant for that."""
    needing = NEEDING - ({"kafka"} if os.environ.get("MILLSTREAM_TEST_KAFKA") else set())
    if any(needing & set(getattr(item, "fixturenames", ())) for item in items):
        why_not()


def require_kafka() -> None:
    """Skip or fail the test when no broker can be had."""
    unless(why_not())


def unless(reason: str | None) -> None:
    if reason is None:
        return
    if os.environ.get("MILLSTREAM_REQUIRE_KAFKA") == "1":
        pytest.fail(f"MILLSTREAM_REQUIRE_KAFKA=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def kafka_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the brokers of this session have their folders; none of them outlives the session."""
    require_kafka()
    folder = tmp_path_factory.mktemp("kafka")
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(folder)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,  # so that no Ctrl-C ends it before its time
    )
    try:
        yield folder
    finally:
        guard.communicate(timeout=30)
        for data in folder.glob("*/kafka"):
            shutil.rmtree(data, ignore_errors=True)  # the logs stay, for as long as pytest keeps the folder


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[str]:
    """`host:port` of a broker that all tests share: see `prefix`, and leave it running."""
    given = os.environ.get("MILLSTREAM_TEST_KAFKA")
    if given:
        unless(no_client())
        yield given
        return
    node = Node(request.getfixturevalue("kafka_folder") / "shared", port=0, java_options=QUICK)
    node.start()
    try:
        yield node.address
    finally:
        node.stop()


@pytest.fixture
def make_kafka(kafka_folder: Path) -> Iterator[Callable[..., Node]]:
    """`make_kafka(listeners=…, properties=…, scram_users=…)` → a node that is not started yet; killed at the end."""
    nodes: list[Node] = []

    def make(**options) -> Node:
        options = {"port": 0, "java_options": QUICK, **options}
        node = Node(kafka_folder / f"own-{uuid.uuid4().hex[:8]}", **options)
        nodes.append(node)
        return node

    try:
        yield make
    finally:
        for node in nodes:
            node.kill()
            shutil.rmtree(node.data / "kafka", ignore_errors=True)


@pytest.fixture
def own_kafka(make_kafka: Callable[..., Node]) -> Node:
    """A running node of this test alone: `kill()`, `pause()`, `resume()`, `stop()`, `start()`; its port stays."""
    node = make_kafka()
    node.start()
    return node


@pytest.fixture
def prefix() -> str:
    """A beginning of topic and group names that no other test has."""
    return f"t{uuid.uuid4().hex[:10]}."
