"""Probes run in processes of their own: one that hangs, dies or raises is a finding, and the others go on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.doctor.probes import PROBES
from engine.doctor.result import Request
from engine.doctor.runner import Finding, Probe, run
from engine.settings import Config, RewardConfig, RunConfig

HERE = "tests.support.doctor_probes"


def request(folder: Path | str = "runs/run") -> Request:
    return Request(config=Config(run=RunConfig(dir=str(folder)), reward=RewardConfig(function="exact")))


def probe(name: str, lane: str = "log", deadline_s: float = 60.0) -> Probe:
    return Probe(name, name, lane, f"{HERE}:{name}", deadline_s)


def test_a_probe_that_hangs_is_a_fail_with_its_name_and_leaves_no_process(tmp_path: Path) -> None:
    (found,) = run([probe("hangs", deadline_s=8.0)], request(tmp_path))
    assert found.result.status == "fail"
    assert "hangs did not end within 8 s" in found.result.evidence
    assert found.result.evidence.endswith("waiting for a library that never answers")
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, f"process {child} outlived its probe"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_probe_whose_process_dies_is_a_fail_that_says_how() -> None:
    (found,) = run([probe("dies")], request())
    assert found.result.status == "fail"
    assert "killed by SIGABRT" in found.result.evidence
    assert "undefined symbol: musaMalloc" in found.result.evidence


def test_an_exception_of_a_probe_is_its_evidence_on_one_line() -> None:
    (found,) = run([probe("raises")], request())
    assert found.result.status == "fail"
    assert found.result.evidence.startswith(
        "ImportError: libmccl.so.2: cannot open shared object file (doctor_probes.py:"
    )


def test_what_a_library_prints_does_not_spoil_the_answer() -> None:
    (found,) = run([probe("is_noisy")], request())
    assert (found.result.status, found.result.evidence) == ("pass", "two lines")


def test_what_the_accelerator_is_the_later_probes_of_its_lane_are_told() -> None:
    found = run([probe("finds_cuda", "device"), probe("tells", "device")], request())
    assert found[1].result.evidence == "cuda 2 (9, 0)"


def test_lanes_run_at_once_and_findings_keep_the_order_of_the_probes(tmp_path: Path) -> None:
    heard: list[str] = []

    def told(finding: Finding) -> None:
        heard.append(finding.probe.name)

    probes = [probe("hangs", "model", deadline_s=8.0), probe("is_noisy", "log")]
    found = run(probes, request(tmp_path), told=told)
    assert [each.probe.name for each in found] == ["hangs", "is_noisy"]
    assert heard == ["is_noisy", "hangs"]


def test_a_probe_that_does_not_apply_is_skipped_without_a_process() -> None:
    nothing = Probe("absent", "absent", "log", "no.such.module:at_all", 1.0, lambda request: "not asked for")
    (found,) = run([nothing], request())
    assert (found.result.status, found.result.evidence) == ("skip", "not asked for")


def test_the_seven_points_of_the_checklist_each_have_a_probe_and_names_are_unique() -> None:
    assert {each.point for each in PROBES} - {""} == set("abcdefg")
    names = [each.name for each in PROBES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("each", PROBES, ids=lambda each: each.name)
def test_every_probe_names_a_function_that_is_there(each: Probe) -> None:
    import importlib

    module, _, function = each.place.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
