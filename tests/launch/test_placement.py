"""What a run asks of a cluster, and what is said when it is not there. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, build_config, fingerprint
from engine.launch.daemon import DaemonSpec
from engine.launch.local import daemons_of
from engine.launch.on_ray.host import About
from engine.launch.on_ray.launcher import RayCluster
from engine.launch.on_ray.placement import Bundle, Node, Plan, plan, shortage
from streams.errors import ConfigError

TRAINER = DaemonSpec("trainer")


def config_of(**sections: dict[str, Any]) -> Config:
    table: dict[str, dict[str, Any]] = {
        "data": {"path": "prompts.jsonl"},
        "reward": {"function": "exact"},
        "model": {"path": "model", "device": "cuda"},
        "trainer": {"backend": "fsdp2"},
    }
    for section, values in sections.items():
        table.setdefault(section, {}).update(values)
    return build_config(table)


def planned(**sections: dict[str, Any]) -> Plan:
    config = config_of(**sections)
    return plan(config, daemons_of(config))


def as_table(found: Plan) -> dict[str, tuple[int, list[str]]]:
    return {each.name: (each.gpus, [member.name for member in each.members]) for each in found.bundles}


def test_disaggregated_engines_have_gpus_of_their_own():
    found = planned(
        trainer={"n_ranks": 4},
        rollout={"replicas": 2},
        placement={"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2},
    )
    assert as_table(found) == {
        "trainer/0": (4, ["trainer-0"]),
        "feeder-0": (0, ["feeder-0"]),
        "rollout-0": (2, ["rollout-0"]),
        "rollout-1": (2, ["rollout-1"]),
        "reward-0": (0, ["reward-0"]),
        "collector-0": (0, ["collector-0"]),
    }
    assert found.needs() == {"CPU": 4 + 5, "GPU": 8}


def test_without_a_word_every_rank_and_every_engine_has_one_gpu():
    assert planned(trainer={"n_ranks": 2}, rollout={"replicas": 3}).needs()["GPU"] == 5
    assert "GPU" not in planned(model={"device": "cpu"}, trainer={"n_ranks": 2}).needs()


def test_colocated_engines_share_the_gpus_of_the_trainers_node():
    found = planned(
        trainer={"n_ranks": 8},
        rollout={"replicas": 4},
        placement={"colocate": True, "actor_num_nodes": 2, "rollout_num_gpus_per_engine": 2},
    )
    assert found.needs()["GPU"] == 8
    second = found.bundles[1]
    assert second.name == "trainer/1"
    assert [(member.name, member.devices) for member in second.members] == [
        *((f"trainer-0.rank{4 + at}", slice(at, at + 1)) for at in range(4)),
        ("rollout-2", slice(0, 2)),
        ("rollout-3", slice(2, 4)),
    ]


def test_a_trainer_on_several_nodes_has_a_process_for_each_rank_in_the_order_of_ranks():
    found = planned(trainer={"n_ranks": 4}, placement={"actor_num_nodes": 2})
    members = found.members(TRAINER)
    assert [(at, member.rank) for at, member in members] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_an_evaluator_has_an_engine_and_a_teacher_a_device():
    found = planned(
        eval={"path": "held-out.jsonl"},
        teacher={"path": "teacher", "device": "cuda", "replicas": 2},
        trainer={"loss": "opd", "backend": "torch"},
    )
    gpus = {bundle.name: bundle.gpus for bundle in found.bundles}
    assert gpus["evaluator-0"] == gpus["teacher-0"] == gpus["teacher-1"] == 1


def test_bundles_ask_for_no_resource_of_which_they_need_none():
    cpus = planned(model={"device": "cpu"}, placement={"num_cpus": 0})
    assert all(bundle.resources() == {"CPU": 0.001} for bundle in cpus.bundles), "Ray refuses empty bundles"


@pytest.mark.parametrize("key, value", [("model", "cuda:1"), ("teacher", "cuda:0")])
def test_a_device_by_number_is_refused(key: str, value: str):
    with pytest.raises(ConfigError, match=f'{key}.device = "{value}".*Ray chooses.*"cuda"'):
        planned(**{key: {"device": value}})


def test_devices_of_two_kinds_are_refused():
    with pytest.raises(ConfigError, match="counted as one kind"):
        planned(
            teacher={"path": "t", "device": "musa"},
            trainer={"loss": "opd", "backend": "torch"},
        )


@pytest.mark.parametrize(
    "placement, others, said",
    [
        (
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            {},
            "rollout_num_gpus = 3 is not divisible by placement.rollout_num_gpus_per_engine = 2",
        ),
        (
            {"rollout_num_gpus": 4},
            {"rollout": {"replicas": 2}},
            "is 4 engines, and rollout.replicas = 2; set replicas to 4",
        ),
        ({"rollout_num_gpus": 1, "colocate": True}, {}, "the engines share the trainer's GPUs"),
        ({"actor_num_nodes": 2}, {"trainer": {"n_ranks": 3}}, "does not divide trainer.n_ranks = 3"),
        (
            {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8},
            {"trainer": {"n_ranks": 4}},
            "2 × 8 is not trainer.n_ranks = 4: a rank has one GPU; set n_ranks to 16",
        ),
        (
            {"colocate": True},
            {"trainer": {"n_ranks": 4}, "rollout": {"replicas": 2}},
            "are 2, and the trainer has 4; set rollout.replicas to 4",
        ),
        (
            {"colocate": True, "rollout_num_gpus_per_engine": 3},
            {"trainer": {"n_ranks": 4}},
            "it must divide the 4 GPUs of the trainer on each node",
        ),
        ({"rollout_num_gpus": 1}, {"model": {"device": "cpu"}}, "no GPU would be used"),
        ({"colocate": True}, {"model": {"device": "cpu"}}, "no GPU would be used"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    placement: dict[str, Any], others: dict[str, dict[str, Any]], said: str
):
    with pytest.raises(ConfigError) as refused:
        config_of(placement=placement, **others)
    assert said in str(refused.value)
    assert str(refused.value).count("placement") < 6 and "problems" not in str(refused.value)


def test_placement_is_no_part_of_what_a_run_is():
    assert fingerprint(config_of()) == fingerprint(config_of(placement={"num_cpus": 4, "unattended_s": 5}))


def test_what_is_missing_is_said_with_what_others_use():
    wanted = Plan("cuda", tuple(Bundle(f"rollout-{at}", 1, 1, ()) for at in range(3)))
    nodes = [Node("a", {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 1}), Node("b", {"CPU": 8}, {"CPU": 2})]
    assert shortage(wanted, nodes) == "GPU: needs 3, has 1 free of 4, 2 pending"
    assert shortage(wanted, [Node("a", {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4})]) == ""


def test_enough_gpus_in_all_and_too_few_on_any_node_is_said():
    wanted = Plan("cuda", (Bundle("rollout-0", 0, 2, ()),))
    nodes = [Node(name, {"GPU": 1}, {"GPU": 1}) for name in "ab"]
    assert shortage(wanted, nodes) == "rollout-0 needs 2 GPU on one node, and the largest has 1"


# ---------------------------------------------------------------- what all nodes must have in common


def about(**changes: Any) -> About:
    from engine.cli import version

    here = About(
        job="",
        node="n",
        hostname="node-b",
        ip="10.0.0.3",
        machine="m",
        python="3.11.7",
        version=version(),
        devices=(),
        problem="",
        sees_run_dir=True,
        pid=1,
    )
    return here._replace(**changes)


def checked(found: list[About], **sections: dict[str, Any]) -> None:
    config = config_of(**sections)
    RayCluster(config, daemons_of(config), {}, "auto", None)._check_all(found)


def test_a_node_that_does_not_see_the_run_directory_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"node-b \(10.0.0.3\) does not see .* a folder that all nodes share"
    ):
        checked([about(), about(sees_run_dir=False)])


def test_an_embedded_log_over_several_machines_is_refused_and_kafka_is_not():
    two = [about(), about(machine="other", hostname="node-c")]
    with pytest.raises(ConfigError, match=r"embedded log.*node-c .* not the machine of the others.*kafka://"):
        checked(two)
    checked(two, log={"url": "kafka://10.0.0.1:9092"})
    checked([about(), about(node="another Ray node of the same machine")])


def test_another_release_and_a_bad_mask_are_refused():
    with pytest.raises(ConfigError, match=r"node-b .* has Millstream 0\.0\.1.*install the same"):
        checked([about(version="0.0.1")])
    with pytest.raises(ConfigError, match=r"node-b .*: lists 1"):
        checked([about(problem="lists 1")])
