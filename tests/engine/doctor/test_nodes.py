"""Several nodes, played by servers on this machine: closed ports, clocks, versions, folders that differ."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.doctor import network, others, peers
from engine.doctor.operations import Operations, Refused, folders_of, operations_of
from engine.doctor.peers import Node, NoPeer, PeerServer, nodes
from engine.doctor.result import Request
from engine.settings import (
    Config,
    LogConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SGLangConfig,
    WeightsConfig,
)

ROOT = Path(__file__).parents[3]


def request(run_dir: Path, *peers: str, model: str = "", port: int = 0) -> Request:
    config = Config(
        run=RunConfig(dir=str(run_dir)),
        model=ModelConfig(path=model),
        weights=WeightsConfig(master_port=port),
        reward=RewardConfig(function="exact"),
    )
    return Request(config=config, has_config=True, peers=peers)


@contextmanager
def serving(node: Operations) -> Iterator[str]:
    """A node on this machine's loopback: HOST:PORT."""
    stop = threading.Event()
    with PeerServer("127.0.0.1", 0, node) as server:
        thread = threading.Thread(target=server.serve, args=(stop.is_set, 110.0))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            stop.set()
            thread.join(timeout=20)


def node_of(run_dir: Path, model: str = "") -> Operations:
    return Operations(folders_of(str(run_dir), model))


class Walled(Operations):
    """Says that it listens, but a firewall takes no connection: nobody is there."""

    def listen(self, port: int = 0, at: str = "") -> int:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            return int(gone.getsockname()[1])


class Deaf(Operations):
    """Cannot connect to whoever asks."""

    def connect(self, host: str, port: int, asker: str = "") -> str:
        return "timed out"


class Other(Operations):
    """Another clock and other versions."""

    def ask(self, operation: str, asker: str = "", **arguments: Any) -> Any:
        if operation == "clock":
            return time.time() + 4.0
        answer = super().ask(operation, asker, **arguments)
        if operation == "hello":
            answer["versions"] = {**answer["versions"], "torch": "2.9.1"}
            answer["interfaces"] = {"eth0": "198.51.100.7/24"}
        return answer


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_two_nodes_that_agree_pass_every_probe_between_nodes(run_dir: Path) -> None:
    with serving(node_of(run_dir)) as peer:
        asked = request(run_dir, peer)
        assert others.ports(asked).status == "pass"
        assert "2 connections between 2 nodes" in others.ports(asked).evidence
        assert others.shared_folders(asked).status == "pass"
        assert others.clocks(asked).status == "pass"
        assert others.equal_versions(asked).status == "pass"
    assert list(run_dir.iterdir()) == [], "a probe leaves no file"


def test_a_port_that_is_closed_in_one_direction_fails_and_names_it(run_dir: Path) -> None:
    with serving(Walled({})) as peer:
        result = others.ports(request(run_dir, peer))
    assert result.status == "fail"
    assert "1 of 2 ways are closed" in result.evidence
    assert f"{socket.gethostname()} → {peer}, an ephemeral port: Connection refused" in result.evidence
    with serving(Deaf({})) as peer:
        result = others.ports(request(run_dir, peer))
    assert result.status == "fail"
    assert f"{peer} → {socket.gethostname()}, an ephemeral port: timed out" in result.evidence


def test_a_fixed_port_that_is_taken_fails_by_the_name_of_its_setting(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = others.ports(request(run_dir, port=port))
    assert result.status == "fail"
    assert f"weights.master_port = {port}" in result.evidence
    assert others.ports(request(run_dir, port=port)).status == "pass"


def test_each_peer_seeks_this_node_at_the_address_from_which_it_was_reached(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two networks: the address in the one is of no use in the other."""
    sought: list[tuple[str, str]] = []

    @contextmanager
    def reached(peer: str) -> Iterator[tuple[Node, str]]:
        def ask(operation: str, **where: Any) -> Any:
            if operation == "listen":
                return Operations({}).listen()
            sought.append((peer, where["host"]))
            return ""

        yield Node(peer, "127.0.0.1", ask), peer.replace(".2:1", ".1")

    monkeypatch.setattr(peers, "_tcp_node", reached)
    assert others.ports(request(run_dir, "10.0.0.2:1", "10.1.0.2:1")).status == "pass"
    assert sought == [("10.0.0.2:1", "10.0.0.1"), ("10.1.0.2:1", "10.1.0.1")]


def with_services(run_dir: Path, *named: str, brokers: str = "", url: str = "") -> Request:
    asked = request(run_dir, *named)
    log = LogConfig(url=f"kafka://{brokers}/doctor.") if brokers else LogConfig()
    rollout = (
        RolloutConfig(backend="sglang", replicas=2, sglang=SGLangConfig(url=url)) if url else RolloutConfig()
    )
    return msgspec.structs.replace(
        asked, config=msgspec.structs.replace(asked.config, log=log, rollout=rollout)
    )


def test_every_node_must_reach_the_brokers_and_the_servers_that_the_configuration_names(
    run_dir: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as broker, socket.create_server(("127.0.0.1", 0)) as server:
        brokers = f"127.0.0.1:{broker.getsockname()[1]}"
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        asked = with_services(run_dir, brokers=brokers, url=url)
        with serving(operations_of(asked.config)) as peer:
            asked = with_services(run_dir, peer, brokers=brokers, url=url)
            assert others.services(asked).status == "pass"
            server.close()
            result = others.services(asked)
    assert result.status == "fail"
    assert "4 of 6 ways are closed" in result.evidence  # two replicas, from both nodes
    assert f"{peer} → {url[7:]} (rollout.sglang.url of replica 1): Connection refused" in result.evidence


def test_a_node_connects_to_no_service_but_its_own_configurations(run_dir: Path) -> None:
    with serving(Operations({}, ["10.0.0.9:9092"])) as peer:
        result = others.services(with_services(run_dir, peer, brokers="127.0.0.1:1"))
    assert result.status == "fail"
    assert "127.0.0.1:1 is no address in this node's configuration; it has 10.0.0.9:9092" in result.evidence


def test_without_other_nodes_or_services_there_is_nothing_to_reach(run_dir: Path) -> None:
    assert "one node" in others.no_services(with_services(run_dir, brokers="h:1"))
    assert "neither" in others.no_services(request(run_dir, "h:1"))
    assert others.no_services(with_services(run_dir, "h:1", brokers="h:1")) == ""


def test_a_port_of_ray_that_is_closed_on_one_node_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened, socket.create_server(("127.0.0.1", 0)) as gone:
        there, closed = opened.getsockname()[1], gone.getsockname()[1]
        gone.close()
        found = [
            Node(name, "127.0.0.1", Operations({}).ask, ports=ports)
            for name, ports in (
                ("a", {"GCS": there}),
                ("b", {"node manager": closed, "object manager": there}),
            )
        ]

        @contextmanager
        def cluster(_: Request) -> Iterator[list[Node]]:
            yield found

        monkeypatch.setattr(others, "nodes", cluster)
        result = others.ray_ports(request(run_dir))
    assert result.status == "fail"
    assert "1 of 3 ways are closed" in result.evidence
    assert f"a → b, node manager ({closed}): Connection refused" in result.evidence
    assert "--node-manager-port" in result.remedy


def test_clocks_that_differ_fail_with_the_difference(run_dir: Path) -> None:
    with serving(Other({})) as peer:
        result = others.clocks(request(run_dir, peer))
    assert result.status == "fail"
    difference = re.search(r"\+(\d\.\d+) s", result.evidence)
    assert difference and abs(float(difference[1]) - 4.0) < 0.5


def test_unequal_versions_fail_and_name_package_and_nodes(run_dir: Path) -> None:
    with serving(Other({})) as peer:
        result = others.equal_versions(request(run_dir, peer))
    assert result.status == "fail"
    assert "torch: " in result.evidence and f"2.9.1 on {peer}" in result.evidence


def test_unequal_versions_of_what_need_not_agree_are_a_warning() -> None:
    same = {"python": "3.11.7", "torch": "2.15.0", "system": "a"}
    result = others.judge_versions(
        [("a", {**same, "numpy": "1"}), ("b", {**same, "numpy": "2", "system": "b"})]
    )
    assert result.status == "warn" and "numpy: 1 on a, 2 on b" in result.evidence


def test_nodes_without_a_common_network_are_a_warning(run_dir: Path) -> None:
    with serving(Other({})) as peer:
        assert others.subnets(request(run_dir, peer)).status == "warn"
    here = {"lo": "127.0.0.1/8", "eth0": "10.1.2.3/16"}
    assert others.judge_subnets([("a", here), ("b", {"eth7": "10.1.9.9/16"})]).status == "pass"


def test_a_run_directory_that_is_not_shared_fails_in_both_directions(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with serving(node_of(elsewhere)) as peer:
        result = others.shared_folders(request(run_dir, peer))
    assert result.status == "fail"
    here = socket.gethostname()
    assert f"{peer} does not see the file of {here} within 5 s" in result.evidence
    assert f"{here} does not see the file of {peer} within 5 s" in result.evidence


def test_a_node_that_cannot_write_the_shared_folder_is_named(run_dir: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with serving(node_of(in_the_way / "run")) as peer:
        result = others.shared_folders(request(run_dir, peer))
    assert result.status == "fail" and f"{peer} cannot write" in result.evidence


def test_models_that_differ_between_nodes_fail_by_file(run_dir: Path, tmp_path: Path) -> None:
    for name, template in (("ours", "a"), ("theirs", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(template)
        (tmp_path / name / "config.json").write_text("{}")
    with serving(node_of(run_dir, str(tmp_path / "theirs"))) as peer:
        result = others.shared_folders(request(run_dir, peer, model=str(tmp_path / "ours")))
    assert result.status == "fail"
    assert f"model.path of {peer} differs" in result.evidence and "chat_template.jinja" in result.evidence
    assert "config.json" not in result.evidence


def test_a_run_directory_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = others.shared_folders(request(tmp_path / "file" / "run"))
    assert result.status == "fail" and "Not a directory" in result.evidence


def test_a_peer_that_is_not_there_is_named_with_the_command_that_starts_it(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        peer = f"127.0.0.1:{gone.getsockname()[1]}"
    expected = f"{peer}: .*; start `millstream doctor CONFIG --serve"
    with pytest.raises(NoPeer, match=expected), nodes(request(run_dir, peer)):
        pass


def test_a_node_does_for_others_only_what_it_must(run_dir: Path) -> None:
    node = node_of(run_dir)
    with pytest.raises(Refused, match="connects to whoever asks"):
        node.ask("connect", asker="10.0.0.1", host="10.0.0.9", port=22)
    with pytest.raises(Refused, match="no nonce"):
        node.ask("see", folder="run.dir", name="../../etc/passwd")
    with pytest.raises(Refused, match=r"no folder 'model\.path'"):
        node.ask("digest", folder="model.path")
    with pytest.raises(Refused, match="no operation 'eval'"):
        node.ask("eval")


def test_a_refused_question_is_an_error_of_the_asker_and_the_node_serves_on(run_dir: Path) -> None:
    with serving(node_of(run_dir)) as peer, nodes(request(run_dir, peer)) as found:
        with pytest.raises(NoPeer, match="no nonce"):
            found[1].ask("place", folder="run.dir", name="evil", text="x")
        assert abs(found[1].ask("clock") - time.time()) < 60


def test_the_command_that_serves_answers_and_ends_by_a_signal(run_dir: Path) -> None:
    command = [sys.executable, "-m", "engine.cli", "doctor", "--serve", "127.0.0.1:0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=run_dir, env=environ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.match(r"serving at (127\.0\.0\.1:\d+) for 30 minutes", said)
            assert found, said
            assert others.clocks(request(run_dir, found[1])).status == "pass"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


# -- the card


@pytest.mark.parametrize(
    ("environ", "found", "status", "said"),
    [
        ({"MCCL_SOCKET_IFNAME": "ib9"}, {"eth0": "10.0.0.1/24"}, "fail", "MCCL_SOCKET_IFNAME='ib9'"),
        ({}, {"eth0": "10.0.0.1/24", "ib0": "10.9.0.1/24"}, "fail", "there are several interfaces"),
        ({}, {"eth0": "10.0.0.1/24", "docker0": "172.17.0.1/16"}, "pass", "one interface: eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, {"eth0": "10.0.0.1/24"}, "pass", "eth0 is up, 10.0.0.1/24"),
        (
            {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"},
            {"eth0": "10.0.0.1/24", "ib0": "10.9.0.1/24"},
            "warn",
            "told different interfaces",
        ),
    ],
)
def test_the_training_card_is_judged_by_what_is_up(
    run_dir: Path, environ: dict[str, str], found: dict[str, str], status: str, said: str
) -> None:
    result = network.judge_card(request(run_dir, "10.0.0.2:1"), found, environ)
    assert (result.status, said in result.evidence) == (status, True), result


def test_a_hostname_on_loopback_fails_only_where_there_are_other_nodes(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert network.node_address(request(run_dir)).status == "pass"
    assert network.node_address(request(run_dir, "10.0.0.2:1")).status == "fail"
    assert "lo" in network.interfaces() or not Path("/sys/class/net/lo").exists()
