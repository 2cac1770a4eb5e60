"""A node of Apache Kafka through all that happens to it: crashes, hangs, taken ports, wrong folders."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from streams.broker import node as node_module
from streams.broker import probe
from streams.broker.errors import BrokerFailed
from streams.broker.node import Node
from streams.broker.ports import HOST
from streams.broker.properties import CONTROLLER, Listener
from streams.errors import ConfigError
from tests.support.kafka import QUICK, require_kafka

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0

MakeNode = Callable[..., Node]


@contextmanager
def taken_port(port: int = 0) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
        yield listener.getsockname()[1]


@contextmanager
def process(program: str, data: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that is gone at the end, whatever happens."""
    started = subprocess.Popen(
        [sys.executable, "-c", program, str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


def put(address: str, topic: str, *values: bytes) -> None:
    from kafka import KafkaProducer

    with closing(KafkaProducer(bootstrap_servers=address, acks="all", request_timeout_ms=10_000)) as producer:
        for value in values:
            producer.send(topic, value, partition=0).get(timeout=DEADLINE_S)


def create(address: str, topic: str) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import NewTopic

    with closing(KafkaAdminClient(bootstrap_servers=address)) as admin:
        admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])


def kept(address: str, topic: str) -> list[bytes]:
    from kafka import KafkaConsumer
    from kafka.structs import TopicPartition

    partition = TopicPartition(topic, 0)
    with closing(KafkaConsumer(bootstrap_servers=address, group_id=None)) as consumer:
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        (end,) = consumer.end_offsets([partition]).values()
        values: list[bytes] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(values) < end:
            assert time.monotonic() < deadline, f"read {len(values)} of {end}"
            for records in consumer.poll(timeout_ms=200).values():
                values += [record.value for record in records]
        return values


@pytest.fixture(scope="module")
def lasting(kafka_folder: Path) -> Iterator[Node]:
    node = Node(kafka_folder / "node", port=0, java_options=QUICK)
    yield node
    node.kill()


@pytest.fixture
def running(lasting: Node) -> Node:
    """The node of these tests, running; they may do anything to it that its next start mends."""
    lasting.start()
    return lasting


def test_what_was_acknowledged_outlives_a_kill_and_a_stop_on_the_same_port(running: Node) -> None:
    address = running.address
    create(address, "kept")
    put(address, "kept", b"before the kill")
    running.kill()
    assert running.status().answers is False
    assert running.start() is True
    put(address, "kept", b"after the kill")
    assert running.stop() is True
    assert running.start() is True
    assert running.address == address
    assert kept(address, "kept") == [b"before the kill", b"after the kill"]


def test_a_node_takes_another_port_and_another_controller_port_with_the_same_data(
    make_kafka: MakeNode,
) -> None:
    node = make_kafka()
    node.start()
    create(node.address, "moved")
    put(node.address, "moved", b"here")
    node.stop()
    controller = int(node.address_of(CONTROLLER).rpartition(":")[2])
    other_port = node_module.free_ports(1)[0]
    with taken_port(controller):
        Node(node.data, port=other_port, java_options=QUICK).start()
    assert node.address == f"{HOST}:{other_port}"
    assert node.address_of(CONTROLLER) != f"{HOST}:{controller}"
    assert kept(node.address, "moved") == [b"here"]


def test_a_second_start_finds_it_running_and_another_port_is_refused_meanwhile(running: Node) -> None:
    pid = running.pid
    assert Node(running.data).start() is False
    assert running.pid == pid
    with pytest.raises(ConfigError, match=r"runs on port \d+, not 1234: stop it first"):
        Node(running.data, port=1234).start()
    assert running.status().answers


def test_two_processes_that_start_it_at_once_get_one_broker(make_kafka: MakeNode) -> None:
    node = make_kafka()
    program = (
        "import sys; from pathlib import Path; from streams.broker.node import Node\n"
        "print(Node(Path(sys.argv[1]), port=0).start())"
    )
    with process(program, node.data) as one, process(program, node.data) as other:
        said = [each.communicate(timeout=DEADLINE_S)[0].strip() for each in (one, other)]
    assert sorted(said) == ["False", "True"]
    assert node.status().answers


def test_a_hanging_node_is_told_from_a_running_one_and_can_be_stopped(
    running: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "PROBE_TIMEOUT_S", 0.3)
    pid = running.pid
    running.pause()
    assert running.status() == (pid, running.address, False)
    running.resume()
    monkeypatch.undo()
    assert running.status() == (pid, running.address, True)
    running.pause()
    assert running.stop() is True
    assert running.status() == (None, running.address, False)
    with pytest.raises(BrokerFailed, match="does not run"):
        running.pause()


def test_a_pid_file_that_names_another_process_is_not_believed(running: Node) -> None:
    running.kill()
    pid_file = running.data / "broker.pid"
    pid_file.write_text(f"{os.getpid()}\n")
    assert running.status().pid is None
    running.kill()  # had it been believed, this process would be gone
    assert running.start() is True
    pid_file_of_it = pid_file.read_text()
    assert int(pid_file_of_it) == running.pid != os.getpid()


def test_a_taken_port_is_refused_with_who_has_it(make_kafka: MakeNode) -> None:
    with taken_port() as port, pytest.raises(ConfigError) as refused:
        make_kafka(port=port).start()
    assert f"port {port} is taken by pid {os.getpid()} (" in str(refused.value)
    assert "--port 0" in str(refused.value)


def test_a_free_port_that_somebody_takes_first_is_replaced_by_another(
    make_kafka: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_kafka()
    really_free = node_module.free_ports
    with taken_port() as port:
        offers = [[port, *really_free(1)], really_free(2)]
        monkeypatch.setattr(node_module, "free_ports", lambda count: offers.pop(0))
        node.start()
        assert offers == []
        assert node.address != f"{HOST}:{port}"
        assert node.status().answers


def test_a_node_that_does_not_come_up_shows_the_end_of_its_log(running: Node) -> None:
    running.stop()
    broken = Node(running.data, properties={"num.io.threads": 0})
    with pytest.raises(
        BrokerFailed, match=r"ended while it was starting; the end of .*broker\.log:"
    ) as failed:
        broken.start()
    assert "num.io.threads" in str(failed.value)
    assert running.start() is True


def test_a_setting_that_kafka_cannot_read_is_refused_before_anything_is_formatted(
    make_kafka: MakeNode,
) -> None:
    node = make_kafka(properties={"num.io.threads": "many"})
    with pytest.raises(BrokerFailed, match=r"formatting .* failed:\n(.*\n)*.*num\.io\.threads"):
        node.start()
    assert not (node.data / "kafka").exists()
    assert Node(node.data, port=0).start() is True


def test_what_a_crash_in_the_middle_of_formatting_left_is_no_obstacle(make_kafka: MakeNode) -> None:
    node = make_kafka()
    left = node.data / "kafka.new"
    left.mkdir(parents=True)
    (left / "meta.properties").write_text("version=1\n")
    (node.data / "broker.json").write_text(
        json.dumps({"kafka": "4.0.0", "cluster_id": "AAAAAAAAAAAAAAAAAAAAAA", "ports": {}})
    )
    assert node.start() is True
    assert not left.exists()


def test_a_listener_with_login_lets_in_its_users_only(make_kafka: MakeNode) -> None:
    from kafka import KafkaAdminClient

    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    login = Listener(
        "LOGIN",
        "SASL_PLAINTEXT",
        {
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "scram-sha-512.sasl.jaas.config": scram,
        },
    )
    node = make_kafka(listeners=[login], scram_users={"alice": "wonder-land"})
    node.start()
    credentials = {
        "bootstrap_servers": node.address_of("LOGIN"),
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "alice",
        "bootstrap_timeout_ms": 3000,
    }
    with closing(KafkaAdminClient(**credentials, sasl_plain_password="wonder-land")) as admin:
        assert admin.list_topics() == []
    with pytest.raises(Exception, match=r"(?i)authentication|bootstrap"):
        KafkaAdminClient(**credentials, sasl_plain_password="wrong").close()
    before = node.address_of("LOGIN")
    node.kill()
    node.start()
    assert node.address_of("LOGIN") == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    for use in (Node(tmp_path).start, Node(tmp_path).stop, Node(tmp_path).status):
        with pytest.raises(ConfigError, match=r"holds other things \(thesis\.txt\)"):
            use()
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_the_data_of_another_kafka_is_refused_by_its_cluster(tmp_path: Path) -> None:
    (tmp_path / "meta.properties").write_text("#\nversion=0\nbroker.id=3\ncluster.id=old-one\n")
    with pytest.raises(ConfigError, match=r"data of another Kafka \(cluster old-one\)"):
        Node(tmp_path).start()
    file = tmp_path / "meta.properties"
    with pytest.raises(ConfigError, match="is a file"):
        Node(file).start()


def test_data_that_changed_its_cluster_or_is_newer_is_refused(running: Node) -> None:
    running.stop()
    meta = running.data / "kafka" / "meta.properties"
    text = meta.read_text()
    meta.write_text(text.replace("node.id=1", "node.id=7"))
    with pytest.raises(ConfigError, match=r"another cluster or format: node\.id is 7, not 1"):
        running.start()
    meta.write_text(text)
    state_file = running.data / "broker.json"
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "kafka": "5.0.0"}))
    with pytest.raises(ConfigError, match=r"last used by Kafka 5\.0\.0"):
        running.start()
    state_file.write_text(json.dumps(state))


def test_an_interrupted_start_leaves_no_process_behind(make_kafka: MakeNode) -> None:
    node = make_kafka()
    program = (
        # a shell's background jobs, as those of .ci/run, are born deaf to SIGINT
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from streams.broker.node import Node\n"
        "Node(Path(sys.argv[1]), port=0).start()"
    )
    for _ in range(5):  # on a busy machine the start may be over before the signal comes
        with process(program, node.data) as starter:
            deadline = time.monotonic() + DEADLINE_S
            while node.pid is None:
                assert starter.poll() is None and time.monotonic() < deadline
                time.sleep(0.002)
            starter.send_signal(signal.SIGINT)
            code = starter.wait(DEADLINE_S)
        if code:
            break
        node.stop()
    assert code != 0
    assert node.pid is None
    assert node.start() is True


def test_a_node_that_was_never_started_has_no_address(tmp_path: Path) -> None:
    node = Node(tmp_path / "new")
    assert node.status() == (None, None, False)
    assert node.stop() is False
    with pytest.raises(BrokerFailed, match="has not been started"):
        _ = node.address
    assert not node.data.exists()


def test_the_shared_broker_answers_for_its_cluster_and_takes_the_largest_record(
    kafka: str, prefix: str
) -> None:
    from kafka import KafkaProducer

    from streams.checks import MAX_RECORD_BYTES

    answer = probe.ask(int(kafka.rpartition(":")[2]), timeout_s=10)
    assert kafka in answer.brokers and answer.cluster_id
    create(kafka, f"{prefix}large")
    with closing(KafkaProducer(bootstrap_servers=kafka, max_request_size=32 << 20)) as producer:
        sent = producer.send(f"{prefix}large", os.urandom(MAX_RECORD_BYTES), partition=0)
        assert sent.get(timeout=DEADLINE_S).offset == 0


def test_the_broker_of_a_session_that_is_killed_ends_with_it(tmp_path: Path) -> None:
    require_kafka()
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, signal\n"
        "def test_it(own_kafka):\n"
        f"    pathlib.Path({str(tmp_path / 'data')!r}).write_text(str(own_kafka.data))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.support.kafka import *\n")
    session = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert session.returncode == -signal.SIGKILL, session.stdout
    node = Node(Path((tmp_path / "data").read_text()))
    deadline = time.monotonic() + DEADLINE_S
    while node.pid is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
