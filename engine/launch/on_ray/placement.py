"""What a run needs of a cluster: one bundle of resources for each thing that must lie on one node. No Ray here.

    disaggregated (default)                         colocate
    trainer/0 [GPU GPU]   ← its ranks               trainer/0 [GPU GPU]  ← its ranks, rollout-0, rollout-1
    rollout-0 [GPU]  rollout-1 [GPU]                feeder-0 []  reward-0 []  collector-0 []
    feeder-0 []  reward-0 []  collector-0 []

With `actor_num_nodes` above 1 there are trainer/0 … trainer/n−1, and each rank is a process of its own. Every bundle
has CPUs too. All bundles are reserved together, before anything starts, in one placement group: all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.devices.visible import kind_of
from engine.launch.daemon import DaemonSpec
from engine.settings import Config
from streams.errors import ConfigError


class Member(NamedTuple):
    """One process of a bundle: a daemon, or one rank of the trainer."""

    spec: DaemonSpec
    devices: slice  # of its bundle's GPUs
    rank: int | None = None  # None: the daemon is this one process

    @property
    def name(self) -> str:
        return self.spec.name if self.rank is None else f"{self.spec.name}.rank{self.rank}"


class Bundle(NamedTuple):
    """What one node gives, and who lives on it."""

    name: str
    cpus: float
    gpus: int
    members: tuple[Member, ...]

    def resources(self) -> dict[str, float]:
        """As Ray takes them. A bundle of nothing is none, so that it asks for a trace of a CPU then."""
        wanted: dict[str, float] = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in wanted.items() if amount} or {"CPU": 0.001}


class Plan(NamedTuple):
    kind: str  # of the devices: "cpu", "cuda" or "musa"
    bundles: tuple[Bundle, ...]

    def members(self, spec: DaemonSpec) -> list[tuple[int, Member]]:
        """The processes of a daemon, each with the index of its bundle; of the trainer in the order of ranks."""
        return [
            (at, member)
            for at, bundle in enumerate(self.bundles)
            for member in bundle.members
            if member.spec == spec
        ]

    def needs(self) -> dict[str, float]:
        """Of each resource, over all bundles."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.resources().items():
                total[name] = total.get(name, 0) + amount
        return total


class Node(NamedTuple):
    """What a live node has, and what of it is free."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def plan(config: Config, daemons: Sequence[DaemonSpec]) -> Plan:
    """Raises ConfigError where a setting makes sense on one machine alone."""
    for key, device in (("model.device", config.model.device), ("teacher.device", config.teacher.device)):
        if ":" in device:
            raise ConfigError(
                f'{key} = "{device}" with --launcher ray: Ray chooses which device a daemon gets; set '
                f'{key} = "{kind_of(device)}"'
            )
    kind = kind_of(config.model.device)
    if config.teacher.path and config.teacher.device not in ("cpu", kind):
        raise ConfigError(
            f'teacher.device = "{config.teacher.device}" with model.device = "{config.model.device}" and --launcher '
            "ray: a cluster's GPUs are counted as one kind; set them to the same, or one of them to cpu"
        )
    bundles = [*_of_trainer(config, daemons)]
    placed = {member.spec for bundle in bundles for member in bundle.members}
    cpus = config.placement.num_cpus
    for spec in daemons:
        if spec not in placed:
            gpus = _gpus_of(config, spec)
            bundles.append(Bundle(spec.name, cpus, gpus, (Member(spec, slice(0, gpus)),)))
    return Plan(kind, tuple(bundles))


def _of_trainer(config: Config, daemons: Sequence[DaemonSpec]) -> Iterator[Bundle]:
    """One bundle for each node of the trainer, with the engines that share its GPUs."""
    placement, spec = config.placement, DaemonSpec("trainer")
    if spec not in daemons:
        return
    nodes, ranks = placement.actor_num_nodes, config.trainer.n_ranks // placement.actor_num_nodes
    gpus = _gpus_of_trainer(config) // nodes
    engines = [each for each in daemons if each.role == "rollout"] if placement.colocate else []
    each = placement.rollout_num_gpus_per_engine
    on_node = gpus // each if engines else 0
    for node in range(nodes):
        own = [Member(spec, slice(0, gpus))]
        if nodes > 1:
            own = [
                Member(spec, slice(at, at + 1) if gpus else slice(0, 0), node * ranks + at)
                for at in range(ranks)
            ]
        guests = [
            Member(engine, slice(at * each, (at + 1) * each))
            for at, engine in enumerate(engines[node * on_node : (node + 1) * on_node])
        ]
        cpus = placement.num_cpus * (ranks + len(guests))
        yield Bundle(f"trainer/{node}", cpus, gpus, (*own, *guests))


def _gpus_of_trainer(config: Config) -> int:
    placement = config.placement
    if placement.actor_num_gpus_per_node is not None:
        return placement.actor_num_gpus_per_node * placement.actor_num_nodes
    uses_device = kind_of(config.model.device) != "cpu" and config.trainer.backend != "scalar"
    return config.trainer.n_ranks if uses_device else 0


def _gpus_of(config: Config, spec: DaemonSpec) -> int:
    placement, on_device = config.placement, kind_of(config.model.device) != "cpu"
    if spec.role == "rollout":
        if placement.rollout_num_gpus is not None:
            return placement.rollout_num_gpus // spec.replicas
        return placement.rollout_num_gpus_per_engine if on_device and _has_engine(config) else 0
    if spec.role == "evaluator":  # it has an engine of its own
        return 1 if on_device and _has_engine(config) else 0
    if spec.role == "teacher":
        return 0 if config.teacher.device == "cpu" else 1
    return 0


def _has_engine(config: Config) -> bool:
    """Whether samples come from a model."""
    return config.rollout.backend != "scripted"


def shortage(wanted: Plan, nodes: Sequence[Node]) -> str:
    """What is missing, in words; "" when nothing is that could be seen from the sums.

    >>> engines = tuple(Bundle(f"rollout-{i}", 0, 1, ()) for i in range(3))
    >>> shortage(Plan("cuda", engines), [Node("a", {"GPU": 2}, {"GPU": 2})])
    'GPU: needs 3, has 2, 1 pending'
    """
    said: list[str] = []
    for resource, needed in sorted(wanted.needs().items(), reverse=True):
        free = sum(node.free.get(resource, 0) for node in nodes)
        total = sum(node.total.get(resource, 0) for node in nodes)
        if free + 1e-3 < needed:
            in_use = f" free of {total:g}" if total - free > 1e-3 else ""
            said.append(f"{resource}: needs {needed:g}, has {free:g}{in_use}, {needed - free:g} pending")
        largest = max(bundle.resources().get(resource, 0) for bundle in wanted.bundles)
        most = max((node.total.get(resource, 0) for node in nodes), default=0)
        if most < largest:
            name = next(b.name for b in wanted.bundles if b.resources().get(resource, 0) == largest)
            said.append(f"{name} needs {largest:g} {resource} on one node, and the largest has {most:g}")
    return "; ".join(said)
