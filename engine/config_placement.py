"""Where daemons go on a cluster ([placement]): what cannot be reserved as it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator

from engine.config_problems import Problem
from engine.settings import Config


def find_placement_problems(config: Config) -> Iterator[Problem]:
    """Read by `millstream run --launcher ray` alone, and checked always: a wrong one is wrong anywhere."""
    placement, ranks, replicas = config.placement, config.trainer.n_ranks, config.rollout.replicas
    of_trainer, nodes = placement.actor_num_gpus_per_node, placement.actor_num_nodes
    of_engines, each = placement.rollout_num_gpus, placement.rollout_num_gpus_per_engine
    if ranks % nodes:
        yield Problem(
            ("placement.actor_num_nodes", "trainer.n_ranks"),
            f"placement.actor_num_nodes = {nodes} does not divide trainer.n_ranks = {ranks}: every node has as many "
            "ranks; choose a divisor of it, or raise n_ranks",
        )
    elif of_trainer and of_trainer * nodes != ranks:
        yield Problem(
            ("placement.actor_num_nodes", "placement.actor_num_gpus_per_node", "trainer.n_ranks"),
            f"placement.actor_num_nodes × placement.actor_num_gpus_per_node = {nodes} × {of_trainer} is not "
            f"trainer.n_ranks = {ranks}: a rank has one GPU; set n_ranks to {nodes * of_trainer}, or remove "
            "actor_num_gpus_per_node",
        )
    if of_engines is not None and placement.colocate:
        yield Problem(
            ("placement.rollout_num_gpus", "placement.colocate"),
            f"placement.rollout_num_gpus = {of_engines} with placement.colocate: the engines share the trainer's GPUs "
            "and have none of their own; remove one of them",
        )
    elif of_engines and of_engines % each:
        yield Problem(
            ("placement.rollout_num_gpus", "placement.rollout_num_gpus_per_engine"),
            f"placement.rollout_num_gpus = {of_engines} is not divisible by placement.rollout_num_gpus_per_engine = "
            f"{each}; choose a multiple of it",
        )
    elif of_engines and of_engines // each != replicas:
        yield Problem(
            (
                "placement.rollout_num_gpus",
                "placement.rollout_num_gpus_per_engine",
                "rollout.replicas",
            ),
            f"placement.rollout_num_gpus / placement.rollout_num_gpus_per_engine = {of_engines} / {each} is "
            f"{of_engines // each} engines, and rollout.replicas = {replicas}; set replicas to "
            f"{of_engines // each}, or remove rollout_num_gpus",
        )
    yield from _placement_device(config)


def _placement_device(config: Config) -> Iterator[Problem]:
    placement, device = config.placement, config.model.device
    if device.partition(":")[0] == "cpu":
        for key in ("actor_num_gpus_per_node", "rollout_num_gpus", "colocate"):
            if value := getattr(placement, key):
                yield Problem(
                    (f"placement.{key}", "model.device"),
                    f'placement.{key} = {json.dumps(value)} with model.device = "{device}": '
                    f'no GPU would be used; remove it, or set model.device = "cuda" or "musa"',
                )
    elif placement.colocate:
        yield from _colocated(config)


def _colocated(config: Config) -> Iterator[Problem]:
    placement, replicas = config.placement, config.rollout.replicas
    per_node = placement.actor_num_gpus_per_node
    per_node = config.trainer.n_ranks // placement.actor_num_nodes if per_node is None else per_node
    each, total = placement.rollout_num_gpus_per_engine, per_node * placement.actor_num_nodes
    keys = (
        "placement.colocate",
        "placement.rollout_num_gpus_per_engine",
        "placement.actor_num_gpus_per_node",
        "placement.actor_num_nodes",
        "trainer.n_ranks",
        "rollout.replicas",
    )
    if per_node % each or not per_node:
        yield Problem(
            keys,
            f"placement.rollout_num_gpus_per_engine = {each} with placement.colocate: it must divide the {per_node} "
            "GPUs of the trainer on each node, since an engine lies on one node",
        )
    elif replicas * each != total:
        yield Problem(
            keys,
            f"placement.colocate: {replicas} engines (rollout.replicas) of {each} GPUs are {replicas * each}, and the "
            f"trainer has {total}; set rollout.replicas to {total // each}",
        )
