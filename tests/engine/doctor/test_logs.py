"""Doctor on the log: folders that cannot be written, locks that do not hold, a broker set up otherwise than needed."""

from __future__ import annotations

import fcntl
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import build_config
from engine.doctor import embedded
from engine.doctor import kafka as probes
from engine.doctor.result import Request
from engine.roles import create_topics, open_run_log
from engine.settings import Config, LogConfig, RewardConfig, RunConfig
from streams import codec
from streams.broker.node import Node
from streams.events import BatchCut

MEMBER_DEADLINE_S = 1.0


def request(folder: Path) -> Request:
    config = Config(
        run=RunConfig(dir=str(folder)),
        log=LogConfig(url=f"file://{folder}/log"),
        reward=RewardConfig(function="exact"),
    )
    return Request(config=config, has_config=True)


# -- embedded


def test_a_folder_that_can_be_written_passes_every_probe_and_is_left_as_it_was(tmp_path: Path) -> None:
    asked = request(tmp_path)
    for probe in (embedded.writable, embedded.locks, embedded.room):
        assert probe(asked).status == "pass", probe(asked)
    assert embedded.sync_time(asked).status in ("pass", "warn")  # the machine decides; the figure is there
    assert 0 < embedded.sync_time(asked).facts["median_s"] < 60
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_log_fails_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    asked = request(tmp_path / "run")
    for probe in (embedded.writable, embedded.sync_time, embedded.locks):
        result = probe(asked)
        assert result.status == "fail" and "ot a directory" in result.evidence, result


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_fails_by_room_and_by_writing(full: Path) -> None:
    (full / "ballast").write_bytes(b"x" * (60 << 10))
    assert embedded.room(request(full)).status == "fail"
    result = embedded.writable(request(full))
    assert result.status == "fail" and "No space left" in result.evidence


def test_a_read_only_file_system_fails(full: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
    result = embedded.writable(request(full))
    assert result.status == "fail" and "Read-only" in result.evidence


def test_a_file_system_whose_locks_hold_nobody_back_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as on a mount with `nolock`
    result = embedded.locks(request(tmp_path))
    assert result.status == "fail"
    assert "a second process took a lock that the first holds" in result.evidence


def test_a_network_file_system_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "file_system", lambda folder: "nfs4")
    assert embedded.locks(request(tmp_path)).status == "warn"


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_SLOW_S", 0.0)
    assert embedded.sync_time(request(tmp_path)).status == "warn"


def test_what_a_run_may_need_is_counted(tmp_path: Path) -> None:
    table = {
        "run": {"dir": str(tmp_path), "steps": 10},
        "data": {"path": "prompts.jsonl"},
        "reward": {"function": "exact"},
        "rollout": {"backend": "scripted", "n_samples_per_prompt": 4, "rollout_max_response_len": 1000},
        "trainer": {"backend": "scalar", "rollout_batch_size": 2},
    }
    most, _ = embedded.needed(build_config(table))
    assert most == 10 * 2 * 4 * (1000 * 5 + 1024)  # no model: samples alone


# -- Kafka


def on_kafka(folder: Path, address: str, prefix: str, **log: object) -> Request:
    table = {
        "run": {"dir": str(folder / "run"), "name": "dr", "steps": 100},
        "log": {
            "url": f"kafka://{address}/{prefix}",
            "partitions": 2,
            "kafka": {"session_timeout_s": 6.0},
            **log,
        },
        "data": {"path": "prompts.jsonl"},
        "reward": {"function": "exact", "timeout_s": 1.0},
        "collector": {"member_deadline_s": MEMBER_DEADLINE_S, "max_redispatch": 0},
        "rollout": {"backend": "scripted", "task_deadline_s": 1.0},
        "trainer": {"backend": "scalar"},
        "checkpoint": {"every": 10},
    }
    return Request(config=build_config(table), has_config=True, deep=True)


def test_a_broker_that_is_not_there_fails_with_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    result = probes.reachable(on_kafka(tmp_path, address, ""))
    assert result.status == "fail"
    assert f"no broker takes connections: {address}: Connection refused" in result.evidence


def test_a_port_that_does_not_speak_kafka_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        result = probes.reachable(on_kafka(tmp_path, f"127.0.0.1:{mute.getsockname()[1]}", ""))
    assert result.status == "fail"
    assert "answer" in result.evidence


def test_a_real_broker_passes_before_and_after_the_topics_are_made(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    asked = on_kafka(tmp_path, kafka, prefix)
    assert probes.reachable(asked).status == "pass"
    before = probes.topics(asked)
    assert before.status == "warn" and "do not exist" in before.evidence
    create_topics(asked.config)
    assert probes.topics(asked).status == "pass"
    assert probes.sizes(asked).status == "pass", probes.sizes(asked)
    assert probes.retention(asked).status == "pass"


def test_a_round_through_the_broker_works_and_leaves_no_topic(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    asked = on_kafka(tmp_path, kafka, prefix)
    produced = probes.producing(asked)
    assert produced.status == "pass", produced
    assert f"one of {asked.config.log.max_record_bytes - 1024} bytes" in produced.evidence
    joined = probes.membership(asked)
    assert joined.status == "pass", joined
    with open_run_log(asked.config, readonly=True) as log:
        assert log.topics() == {}


def test_topics_with_wrong_settings_fail_by_name(kafka: str, prefix: str, tmp_path: Path) -> None:
    create_topics(on_kafka(tmp_path, kafka, prefix, retention_s=100.0).config)
    result = probes.topics(on_kafka(tmp_path, kafka, prefix))
    assert result.status == "fail"
    assert "retention.ms" in result.evidence and "dr.tasks" in result.evidence
    other = on_kafka(tmp_path, kafka, prefix, retention_s=100.0, partitions=6)
    assert "has 2 partitions, 6 were asked for" in probes.topics(other).evidence


def test_retention_is_judged_by_the_pace_that_the_run_has_had(
    kafka: str, prefix: str, tmp_path: Path
) -> None:
    def judged(seconds: float) -> tuple[str, str]:
        result = probes.retention(on_kafka(tmp_path, kafka, prefix, retention_s=seconds))
        return result.status, result.evidence

    asked = on_kafka(tmp_path, kafka, prefix, retention_s=100.0)
    create_topics(asked.config)
    assert judged(100.0) == ("warn", "records are removed after 100 s; how long the run takes is not known")
    with open_run_log(asked.config) as log:
        for step, second in enumerate(
            (1_000, 1_010, 1_020)
        ):  # 10 s a step: 100 s a checkpoint, 1000 s in all
            cut = codec.encode(_cut(step), producer="test")
            log.append("dr.ledger", 0, [cut._replace(timestamp_ms=second * 1000)])
    assert judged(150.0)[0] == "fail" and "a checkpoint comes every 100 s" in judged(150.0)[1]
    assert judged(500.0)[0] == "warn" and "the run takes 1000 s" in judged(500.0)[1]
    assert judged(5000.0)[0] == "pass"


def _cut(step: int) -> BatchCut:
    return BatchCut(
        epoch=0,
        version=step,
        frontier=0,
        step=step,
        groups=[],
        positions=[0, 0],
        limit=2,
        on_stale="drop",
        seed=0,
        ledger_read_to=0,
        cut_ms=0,
    )


def test_a_broker_that_takes_no_request_so_large_fails(
    make_kafka: Callable[..., Node], tmp_path: Path
) -> None:
    node = make_kafka(properties={"socket.request.max.bytes": "1000000"})
    node.start()
    result = probes.sizes(on_kafka(tmp_path, node.address, ""))
    assert result.status == "fail"
    assert "socket.request.max.bytes is 1000000" in result.evidence
