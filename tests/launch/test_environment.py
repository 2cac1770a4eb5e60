"""What of the driver's environment goes to other nodes: a list, and what the configuration refers to."""

from __future__ import annotations

from engine.config import Config, build_config
from engine.launch.environment import on_node, passed


def config_of(**reward: object) -> Config:
    return build_config(
        {
            "data": {"path": "prompts.jsonl"},
            "reward": {"function": "exact", **reward},
            "rollout": {"backend": "scripted"},
            "trainer": {"backend": "scalar"},
        }
    )


def test_only_what_the_list_names_goes():
    environ = {
        "NCCL_IB_HCA": "mlx5",
        "MCCL_DEBUG": "INFO",
        "HF_HOME": "/models",
        "PYTHONPATH": "/code",
        "OMP_NUM_THREADS": "2",
        "MILLSTREAM_CACHE": "/cache",
        "PATH": "/driver/bin",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "s",
        "SSH_AUTH_SOCK": "/tmp/x",
    }
    assert set(passed(environ, config_of())) == set(list(environ)[:6])


def test_settings_masks_and_tokens_do_not_go_by_themselves():
    environ = {
        "MILLSTREAM__trainer__lr": "1",  # in the run directory's configuration already
        "MUSA_VISIBLE_DEVICES": "0,1",  # of the driver's node
        "MILLSTREAM_GIVEN_DEVICES": "musa:0",
        "HF_TOKEN": "t",
        "HF_HUB_TOKEN": "t",
        "SGLANG_API_KEY": "k",
        "MILLSTREAM_KAFKA_PASSWORD": "p",
    }
    assert passed(environ, config_of()) == {}


def test_a_secret_goes_where_the_configuration_refers_to_it():
    config = config_of(options={"judge": {"api_key": "env:JUDGE_KEY"}, "hub_token": "env:HF_TOKEN"})
    environ = {"JUDGE_KEY": "k", "HF_TOKEN": "t", "OTHER_KEY": "o"}
    assert passed(environ, config) == {"JUDGE_KEY": "k", "HF_TOKEN": "t"}


def test_a_daemon_has_its_nodes_environment_without_what_ray_put_there():
    node = {
        "PATH": "/node/bin",
        "RAY_JOB_ID": "01",
        "OMP_NUM_THREADS": "1",
        "RANK": "3",
        "MILLSTREAM__run__steps": "9",
    }
    assert on_node(node, {"HF_HOME": "/models"}) == {"PATH": "/node/bin", "HF_HOME": "/models"}


def test_names_of_hardware_are_the_nodes_own_where_it_has_them():
    given = {"MCCL_IB_HCA": "mlx5_0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}
    node = {"MCCL_IB_HCA": "mlx5_4", "NCCL_DEBUG": "WARN"}
    assert on_node(node, given) == {**given, "MCCL_IB_HCA": "mlx5_4"}
