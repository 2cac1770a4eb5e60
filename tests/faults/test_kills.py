"""Any daemon can be killed or stopped at any hand-over: nothing is lost, nothing is trained twice, and the weights are
those of an undisturbed replay. The long schedule is `make soak`; this is a short one for every change."""

from __future__ import annotations

import pytest

from streams.broker.node import Node
from tests.faults.harness import BROKER, HANDOVERS, Fault, broker_of, configuration, plan, soak

DAEMONS = ("feeder-0", "rollout-0", "rollout-1", "reward-0", "reward-1", "collector-0", "trainer-0")


def test_a_schedule_strikes_every_daemon_after_every_hand_over_and_is_the_same_for_a_seed() -> None:
    faults = plan(3, len(DAEMONS) * len(HANDOVERS), DAEMONS)
    assert {(fault.victim, fault.after) for fault in faults} == {
        (victim, after) for victim in DAEMONS for after in HANDOVERS
    }
    assert faults == plan(3, len(faults), DAEMONS)
    assert faults != plan(4, len(faults), DAEMONS)


@pytest.mark.timeout(300)
def test_a_run_under_kills_and_stops_keeps_every_promise_on_the_embedded_log(tmp_path) -> None:
    result = soak(configuration(tmp_path), plan(11, 8, DAEMONS), seed=11)
    assert result.problems == []
    assert result.struck == 8
    assert result.final_digest == result.replay_digest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_under_kills_of_its_daemons_and_of_the_broker_keeps_every_promise_on_kafka(
    tmp_path, own_kafka: Node
) -> None:
    faults = [
        Fault("trainer-0", "batch_cut", "kill"),
        Fault(BROKER, "reward_assigned", "kill"),
        Fault("rollout-1", "trajectory_finished", "kill"),
        Fault("reward-0", "engine_ready", "stop", 1.0),
        Fault(BROKER, "weights_published", "stop", 1.5),
    ]  # every other role, too: test_kafka_cases_takeovers.py
    config = configuration(tmp_path, f"{own_kafka.url}/kills.")
    result = soak(config, faults, seed=0, broker=broker_of(own_kafka))
    assert result.problems == []
    assert result.struck == len(faults)
    assert result.final_digest == result.replay_digest
