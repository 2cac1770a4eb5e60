"""A fleet of engines that come and go while versions are published, and what becomes of their versions and samples.

Short cases of one fault each, with real processes; then a minute of a seeded schedule of kills, freezes and additions
on each transport, which `make soak` runs for ten. (More about single broadcasts: tests/engine/test_transfers.py, for
cases O27 and O28 too; SGLang servers: tests/engine/sglang.)
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from consumers.ledger import Ledger
from engine.commands import rundir
from engine.roles import topics_of
from engine.rollout.scripted import scripted_engine
from replay.verify import verify
from streams.events import (
    EngineFailed,
    EngineJoined,
    EngineReady,
    Event,
    TrajectoryFinished,
    TransferGroupEnded,
    TransferGroupFormed,
    WeightsPublished,
)
from streams.open import open_log
from tests.engine.rollout_support import OnThread, Run, make_worker
from tests.engine.test_transfers import CONTEXT, Fleet, engines
from tests.engine.transfer_daemons import Fault, _candidates, eventually, fleet, serve_role
from tests.faults.fleet_audit import lives_of, unacknowledged
from tests.faults.fleet_daemons import room_for_half, slow_to_load
from tests.faults.fleet_harness import DEADLINE_S, GUESTS, RESIDENTS, configuration, soak
from tests.faults.fleet_plan import FREEZE, FREEZE_KILL, KILL, LEAVE, RECOVERS_S, plan
from tests.support.events import events

__all__ = ["engines"]

pytestmark = pytest.mark.timeout(300)  # the first one waits until torch is imported, on a busy machine too


def of(engines: Fleet, replica: int, life: int, kind: type = EngineReady) -> list[Any]:
    """What an engine said in its first life (0), in its second (1) …"""
    lives: list[list[Any]] = []
    for event in fleet(engines.trainers[-1].log):
        if getattr(event, "engine", "") != f"rollout-{replica}":
            continue
        if isinstance(event, EngineJoined):
            lives.append([])
        elif isinstance(event, kind) and lives:
            lives[-1].append(event)
    return lives[life] if life < len(lives) else []


# ---------------------------------------------------------------- one fault each
def test_an_engine_killed_after_a_transfer_takes_the_newest_version_from_disk_and_is_in_the_next_group_anew(
    engines: Fleet,
) -> None:
    trainer = engines.trainer(deadline_s=20)
    trainer.publish(4)
    engines.start(0)
    engines.start(1)
    engines.whole(0, 1)
    trainer.publish(5)
    assert engines.ways(5, 0, 1) == ["distributed"] * 2
    engines.signal(1, signal.SIGKILL)
    engines.start(1)  # before anybody has noticed
    (ready,) = eventually(lambda: of(engines, 1, 1), "version 5 in its second life")
    assert (ready.version, ready.transport) == (5, "disk")
    engines.whole(0, 1)
    trainer.publish(6)
    assert engines.ways(6, 0, 1) == ["distributed"] * 2
    assert len(engines.events(TransferGroupFormed)) == 2
    (ended,) = engines.events(TransferGroupEnded)
    assert (ended.reason, ended.detail) == ("membership", "an engine joined anew")


def test_a_bucket_cut_short_on_one_receiver_ends_that_engine_alone_and_it_comes_back_whole(
    engines: Fleet,
) -> None:
    """Gloo ends the process of a rank that has less room than what comes: its supervisor starts it anew."""
    trainer = engines.trainer(deadline_s=20)
    trainer.publish(4)
    process = CONTEXT.Process(target=room_for_half, args=(str(engines.folder), 0), daemon=True)
    process.start()
    engines.processes[0] = process
    engines.start(1)
    engines.whole(0, 1)
    trainer.publish(5)
    process.join(60)
    assert process.exitcode == -signal.SIGABRT
    sent = trainer.sender.sent
    assert sent is not None and sent.lost == ["rollout-0"]
    engines.ready(1, 5)
    assert [event.version for event in of(engines, 0, 0)] == [4]
    engines.start(0)
    (ready,) = eventually(lambda: of(engines, 0, 1), "version 5 in its second life")
    assert (ready.version, ready.transport) == (5, "disk")
    engines.whole(0, 1)
    trainer.publish(6)
    assert engines.ways(6, 0, 1) == ["distributed"] * 2


def test_an_engine_frozen_for_longer_than_the_deadline_finishes_no_old_broadcast_when_it_goes_on(
    engines: Fleet,
) -> None:
    trainer = engines.trainer(deadline_s=5)
    trainer.publish(4)
    engines.start(0)
    engines.start(1, Fault("stop", version=5))
    engines.whole(0, 1)
    trainer.publish(5)
    sent = trainer.sender.sent
    assert sent is not None and sent.lost == ["rollout-1"]
    engines.ready(0, 5)
    engines.whole(0)
    trainer.publish(6)
    assert engines.ways(6, 0) == ["distributed"]
    engines.signal(1, signal.SIGCONT)
    assert engines.ready(1, 6).transport == "disk"
    assert [(event.version, event.transport) for event in of(engines, 1, 0)] == [(4, "disk"), (6, "disk")]
    engines.whole(0, 1)
    trainer.publish(7)
    assert engines.ways(7, 0, 1) == ["distributed"] * 2


def test_a_fleet_that_shrinks_to_nobody_costs_no_wait_and_grows_again(engines: Fleet) -> None:
    trainer = engines.trainer(deadline_s=60)
    trainer.publish(1)
    for replica in (0, 1):
        engines.start(replica)
    engines.whole(0, 1)
    trainer.publish(2)
    assert engines.ways(2, 0, 1) == ["distributed"] * 2
    for replica in (0, 1):
        engines.signal(replica, signal.SIGKILL)
    eventually(lambda: not _candidates(trainer), "no engine to be counted on")
    sent = trainer.sender.sent
    assert "distributed" not in trainer.publish(3).uris
    assert trainer.sender.sent is sent  # nothing was sent to anybody
    for replica in (0, 1):
        engines.start(replica)
    engines.whole(0, 1)
    trainer.publish(4)
    for replica in (0, 1):
        second = [(event.version, event.transport) for event in of(engines, replica, 1)]
        assert second[0] == (3, "disk")
        engines.ready(replica, 4)
    assert engines.ways(4, 0, 1) == ["distributed"] * 2


def test_a_restarted_engine_takes_no_version_that_it_only_reads_of_on_its_way_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may be gone, or be read for nothing: the ledger of a long run takes a while to read."""
    run = Run(tmp_path)
    for version in range(40):
        run.publish(version)
    for version in range(30):
        run.store.path(run.epoch, version).unlink()
    fold = Ledger.apply

    def slowly(self: Ledger, offset: int, event: Event) -> bool:
        time.sleep(0.02)
        return fold(self, offset, event)

    monkeypatch.setattr(Ledger, "apply", slowly)
    with OnThread(
        make_worker(run, scripted_engine({"policy": "coin"}, name="e", seed=0, pause_mode="retract"))
    ):
        eventually(lambda: run.of("fleet", EngineReady), "an engine that is ready")
    assert [event.version for event in run.of("fleet", EngineReady)] == [39]
    assert run.of("fleet", EngineFailed) == []


# ---------------------------------------------------------------- O26
def test_o26_a_reborn_engine_makes_no_sample_before_it_holds_a_published_version(tmp_path: Path) -> None:
    """One of two engines is killed under load. Its replacement has base weights at hand, the model's, and takes long
    to load: while others go on for versions, no sample is its own; then it has work, of versions it acknowledged."""
    config = configuration(tmp_path, transport="disk", log={"partitions": 2}, rollout={"replicas": 2})
    rundir.adopt(config)
    folder, gate = config.run.dir, tmp_path / "gate"
    log, topics = open_log(config.log.url), topics_of(config)
    topics.create(log)

    def made(engine: str) -> list[TrajectoryFinished]:
        found = [each for partition in range(2) for each in events(log, topics, "trajectories", partition)]
        return [each for each in found if isinstance(each, TrajectoryFinished) and each.engine == engine]

    def newest() -> int:
        found = events(log, topics, "ledger")
        return max((each.version for each in found if isinstance(each, WeightsPublished)), default=-1)

    def joined() -> list[EngineJoined]:
        found = events(log, topics, "fleet")
        return [each for each in found if isinstance(each, EngineJoined) and each.engine == "rollout-1"]

    roles = [("feeder", 0, 1), ("reward", 0, 1), ("collector", 0, 1), ("trainer", 0, 1)]
    roles += [("rollout", 0, 2), ("rollout", 1, 2)]
    processes = [
        CONTEXT.Process(target=serve_role, args=(folder, *each), daemon=True) for each in roles
    ]  # the last one is the engine that is killed
    try:
        for process in processes:
            process.start()
        eventually(lambda: newest() >= 3 and made("rollout-0") and made("rollout-1"), "both at work", 120)
        processes[-1].kill()
        processes[-1].join(10)
        before = len(made("rollout-1"))
        arguments = (folder, 1, 2, str(gate))
        processes.append(CONTEXT.Process(target=slow_to_load, args=arguments, daemon=True))
        processes[-1].start()
        eventually(lambda: len(joined()) == 2, "the replacement to join")
        then = newest()
        eventually(lambda: newest() >= then + 5, "the others to go on without it")
        assert len(made("rollout-1")) == before
        gate.touch()
        eventually(lambda: len(made("rollout-1")) >= before + 8, "the replacement to be at work")
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    fleet_events = _entries(log, topics, "fleet")
    lives, problems = lives_of(fleet_events, _entries(log, topics, "ledger"))
    assert problems == [] and unacknowledged(log, topics, lives, Counter()) == []
    of_second = [each for each in made("rollout-1") if each.incarnation == joined()[1].incarnation]
    assert len(of_second) >= 8
    assert min(version for each in of_second for _, version, _ in each.versions) >= then
    report = verify(log, topics)
    assert [violation.text for check in report.checks for violation in check.violations] == []
    log.close()


def _entries(log: Any, topics: Any, word: str) -> list[Any]:
    from replay.records import entries

    return list(entries(log, topics.name(word), 0))


# ---------------------------------------------------------------- the schedule
def test_a_schedule_is_the_same_for_a_seed_has_every_fault_and_leaves_one_engine_well() -> None:
    faults = plan(3, 600, RESIDENTS, GUESTS, trainer_every_s=120)
    assert faults == plan(3, 600, RESIDENTS, GUESTS, trainer_every_s=120)
    assert faults != plan(4, 600, RESIDENTS, GUESTS, trainer_every_s=120)
    of_engines = [fault for fault in faults if fault.victim != "trainer-0"]
    assert {fault.how for fault in of_engines} == {KILL, FREEZE, FREEZE_KILL, LEAVE}
    assert {fault.victim for fault in of_engines} == {*RESIDENTS, *GUESTS}
    assert {fault.after for fault in of_engines} >= {"weights_published", "engine_updating", "engine_ready"}
    assert 3 <= len(faults) - len(of_engines) <= 4
    assert max(fault.seconds for fault in of_engines if fault.how == FREEZE) > DEADLINE_S
    for fault in of_engines:
        down = {each.victim for each in of_engines if 0 <= fault.at_s - each.at_s < each.seconds + RECOVERS_S}
        assert len(down) < len(RESIDENTS) + len(GUESTS)


def test_an_audit_names_a_sample_of_a_version_that_only_an_earlier_life_of_its_engine_had(tmp_path) -> None:
    from tests.support.recorded import recorded

    log, topics = recorded()
    lives, _ = lives_of(_entries(log, topics, "fleet"), _entries(log, topics, "ledger"))
    assert unacknowledged(log, topics, lives, Counter())  # that run's engines never said that they had joined


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("transport", "kind"), [("distributed", "full"), ("disk", "delta")])
def test_a_fleet_under_kills_freezes_and_additions_keeps_every_promise(
    tmp_path: Path, transport: str, kind: str
) -> None:
    faults = plan(13, 60, RESIDENTS, GUESTS, trainer_every_s=35)
    result = soak(configuration(tmp_path, transport=transport, kind=kind), faults, seed=13, duration_s=90)
    assert result.problems == []
    assert result.kills and result.freezes and result.figures.versions > result.kills
    assert result.figures.by_transport.get("distributed", 0) > 0 or transport == "disk"
