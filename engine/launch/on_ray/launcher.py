"""The Ray launcher: the daemons of a run on the nodes of a Ray cluster, under the supervisor of any launcher.

    driver (this process): Supervisor ──► RayCluster ──► placement group, one bundle for each thing on one node
                                             │                 └─► a host actor each ──► `millstream serve …` processes
                                             └─ asked ~4 times a second how they are

    prepare   connect ─► is a job of this run there? ─┬─ as asked for now: attach to it
                                                       └─ else end it ─► reserve ALL bundles ─► look at their nodes
    node lost ─► its host is lost ─► its daemons have failed, once each ─► Ray moves the bundle ─► started again there
    close     daemons ended ─► hosts ended ─► reservation given back

Actors and reservation outlive this driver (detached), so that a lost terminal loses no run. They hold no state of it:
any of them may be started again anywhere. What must be on a folder that all nodes see is checked before anything
starts: the run directory, and with it weights, checkpoints and claims. An embedded log needs one machine besides.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.cli import version
from engine.config import Config, dump_toml
from engine.launch import environment
from engine.launch.daemon import DaemonSpec
from engine.launch.local import thread_settings
from engine.launch.on_ray import cluster
from engine.launch.on_ray.cluster import NAMESPACE, PlacementFailed
from engine.launch.on_ray.host import About, Host
from engine.launch.on_ray.hosts import Gang, HostHandle, RayDaemon
from engine.launch.on_ray.placement import Member, Plan, plan, shortage
from engine.launch.supervisor import JOB_FILE, Running, Supervisor
from streams.errors import ConfigError

logger = logging.getLogger(__name__)

_SAY_AGAIN_S = 10.0
_SLICE_S = 0.2
_SHORT_S = 5.0  # for one answer of a host that may be gone
_SECOND_S = 2.0  # hosts that nobody has looked at for so long have no supervisor
_REMOVED_S = 15.0  # for a reservation to be given back


class RayLauncher(Supervisor):
    """The daemons of one run directory, on a Ray cluster.

    Args:
        address: as for engine.launch.on_ray.cluster.connect.
        command: arguments of Python for a daemon; default: `millstream serve` on the run directory.
        prepare, finished, threads: as the local launcher's.
        environ: what daemons are given a part of (engine/launch/environment.py); default: this process's.
    """

    def __init__(
        self,
        config: Config,
        daemons: Sequence[DaemonSpec],
        *,
        address: str = cluster.AUTO,
        command: Callable[[DaemonSpec], Sequence[str]] | None = None,
        prepare: Callable[[Callable[[], bool]], None] | None = None,
        finished: Callable[[], bool] | None = None,
        threads: int = 1,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        given = environment.passed(os.environ if environ is None else environ, config)
        place = RayCluster(config, daemons, thread_settings(threads) | given, address, command)
        super().__init__(
            config,
            daemons,
            place,
            prepare=prepare or (None if command is None else lambda stop: None),
            finished=finished,
        )


class RayCluster:
    """Room on a cluster (engine/launch/supervisor.py, Place)."""

    def __init__(
        self,
        config: Config,
        daemons: Sequence[DaemonSpec],
        given: Mapping[str, str],
        address: str,
        command: Callable[[DaemonSpec], Sequence[str]] | None,
    ) -> None:
        self._config, self._given, self._address = config, given, address
        self._run_dir = Path(config.run.dir)
        self._command = command or self._serve
        self._plan: Plan = plan(config, daemons)
        self._job = job_name(config)
        self._digest = _digest(config, self._plan)
        self._ray: Any = None
        self._connected_here = False
        self._group: Any = None
        self._hosts: dict[int, HostHandle] = {}  # by the index of their bundle
        self._newest: dict[str, RayDaemon] = {}  # by the name of their process
        self._machine = ""  # the only one that daemons may be on, with an embedded log

    # ---------------------------------------------------------------- room
    def prepare(self, stop: Callable[[], bool]) -> bool:
        """Raises ConfigError and PlacementFailed; then nothing of the run is left on the cluster."""
        needs = self._plan.needs()
        self._ray, self._connected_here = cluster.connect(
            self._address, local_cpus=needs.get("CPU", 0) // 1 + 1, local_gpus=needs.get("GPU", 0)
        )
        try:
            if self._attach():
                return True
            return self._reserve(stop) and self._meet(stop)
        except BaseException:
            self._give_back()
            raise

    def start(self, spec: DaemonSpec) -> Running:
        members = self._plan.members(spec)
        if len(members) == 1 and members[0][1].rank is None:
            at, member = members[0]
            return self._begin(at, member, {})
        ranks = {member.rank: (at, member) for at, member in members}

        def begin(rank: int, address: str, port: int) -> RayDaemon:
            at, member = ranks[rank]
            return self._begin(at, member, _meeting(rank, len(ranks), address, port))

        return Gang([self._host(ranks[rank][0]) for rank in range(len(ranks))], begin)

    def close(self) -> None:
        self._give_back()

    def _begin(self, at: int, member: Member, more: Mapping[str, str]) -> RayDaemon:
        name = member.spec.name if not member.rank else member.name  # rank 0's log is that of the daemon
        log_file = self._run_dir / "logs" / f"{name}.log"
        arguments = self._command(member.spec)
        before = self._newest.get(member.name)
        self._newest[member.name] = daemon = RayDaemon(
            self._host(at),
            member,
            arguments,
            {**self._given, **more},
            log_file,
            None if before is None else before.left_behind(),
        )
        return daemon

    # ---------------------------------------------------------------- a job that is there already
    def _attach(self) -> bool:
        """Take over the hosts of this run's job, if they are what would be started now; end them otherwise."""
        ray = self._ray
        try:
            self._group = ray.util.get_placement_group(self._job)
        except ValueError:
            return False
        state = self._state()
        if state == "REMOVED":
            self._group = None
            return False
        actors = cluster.actors_of(ray, self._job)
        self._refuse_a_second(actors)
        found = self._about_all(actors)
        if found and state != "PENDING" and all(about.job == self._digest for _, about in found.values()):
            logger.info("attaching to the job %s, which runs on %d hosts", self._job, len(found))
            for at, (actor, about) in found.items():
                self._hosts[at] = self._handle(at, actor)
                self._hosts[at].about = about
            self._check_all([about for _, about in found.values()])
            return True
        logger.warning(
            "a job of this run is on the cluster with other settings, or not whole: ending it, to go on from its log"
        )
        for actor, _ in found.values():
            for name in self._known(actor):
                actor.terminate.remote(name)
        deadline = time.monotonic() + self._config.supervisor.stop_grace_s
        while time.monotonic() < deadline and any(self._known(actor) for actor, _ in found.values()):
            time.sleep(_SLICE_S)
        for actor, _ in found.values():
            ray.kill(actor, no_restart=True)
        self._unreserve()
        return False

    def _refuse_a_second(self, actors: Sequence[Any]) -> None:
        """The lock on the run directory may hold on one node alone (flock over a network). A supervisor looks at its
        hosts four times a second: hosts that are looked at have one. Raises ConfigError."""
        began = time.monotonic()
        while True:
            latest = [_SECOND_S]
            for actor in actors:
                try:
                    latest.append(self._ray.get(actor.attended_s.remote(), timeout=_SHORT_S))
                except self._ray.exceptions.RayError:  # it is dead, or has not begun
                    continue
            if min(latest) >= _SECOND_S:
                return
            if time.monotonic() - began > 2 * _SECOND_S:
                raise ConfigError(
                    f"{self._run_dir} is already being run: another `millstream run` looks after the job {self._job} "
                    "on this cluster. End that one first"
                )
            time.sleep(_SLICE_S)

    def _about_all(self, actors: Sequence[Any]) -> dict[int, tuple[Any, About]]:
        """By the index of their bundle, one of each. The others, and those that do not answer, are ended: nobody would
        look after them, and after a while they would end what goes on beside them."""
        found: dict[int, tuple[Any, About]] = {}
        for actor in actors:
            try:
                index, about = self._ray.get(
                    [actor.bundle.remote(), actor.about.remote("", "")], timeout=_SAY_AGAIN_S
                )
            except self._ray.exceptions.RayError:
                self._end(actor)
                continue
            if index in found:
                self._end(found[index][0])
            found[index] = actor, about
        return found

    def _end(self, actor: Any) -> None:
        try:
            self._ray.kill(actor, no_restart=True)
        except (self._ray.exceptions.RayError, ValueError):  # it has ended
            pass

    def _known(self, actor: Any) -> list[str]:
        """Names of the daemons that run under a host."""
        try:
            seen = self._ray.get(actor.look.remote(), timeout=_SAY_AGAIN_S)
        except self._ray.exceptions.RayError:
            return []
        return [name for name, each in seen.items() if each.code is None]

    # ---------------------------------------------------------------- reserving
    def _reserve(self, stop: Callable[[], bool]) -> bool:
        """All bundles or none, before anything is started. Raises PlacementFailed."""
        ray, limit = self._ray, self._config.placement.start_timeout_s
        self._group = ray.util.placement_group(
            [bundle.resources() for bundle in self._plan.bundles],
            strategy="PACK",
            name=self._job,
            lifetime="detached",
        )
        (self._run_dir / JOB_FILE).write_text(f"{self._job}\n", encoding="utf-8")
        # they begin when there is room; and if this driver is lost before that, they give it back in time
        for at in range(len(self._plan.bundles)):
            self._host(at)
        began = time.monotonic()
        say_at = began + _SAY_AGAIN_S
        while self._state() != "CREATED":
            time.sleep(_SLICE_S)
            now = time.monotonic()
            if stop():
                self._give_back()
                return False
            if now - began > limit:
                raise PlacementFailed(
                    f"the cluster has not given what the run needs within {limit:g} s "
                    f"(placement.start_timeout_s): {self._lacking()}. Nothing was started; add nodes, end what "
                    "uses them, or ask for less ([placement], rollout.replicas, trainer.n_ranks)"
                )
            if now > say_at:
                say_at += _SAY_AGAIN_S
                logger.warning("waiting for room on the cluster: %s", self._lacking())
        return True

    def _state(self) -> str:
        """Of the reservation: PENDING, CREATED, RESCHEDULING, REMOVED."""
        return str(self._ray.util.placement_group_table(self._group)["state"])

    def _lacking(self) -> str:
        found = shortage(self._plan, cluster.nodes(self._ray))
        return found or (
            "there is enough in all, but not in pieces that the bundles fit into: "
            + ", ".join(f"{bundle.name} {bundle.resources()}" for bundle in self._plan.bundles)
        )

    def _meet(self, stop: Callable[[], bool]) -> bool:
        """Look at every node before the first daemon starts. Raises ConfigError and PlacementFailed."""
        for host in self._hosts.values():
            host.has_room()
        token = secrets.token_hex(8)
        shared = self._run_dir / f".shared-{token}"
        shared.write_text(token, encoding="utf-8")
        try:
            asked = {at: host.actor.about.remote(str(shared), token) for at, host in self._hosts.items()}
            deadline = time.monotonic() + self._config.placement.start_timeout_s
            while absent := [at for at, ref in asked.items() if not self._hosts[at].is_ready(ref)]:
                if stop():
                    self._give_back()
                    return False
                if time.monotonic() > deadline:
                    names = ", ".join(self._plan.bundles[at].name for at in absent)
                    raise PlacementFailed(
                        f"no answer from the hosts of {names} within "
                        f"{self._config.placement.start_timeout_s:g} s (placement.start_timeout_s)"
                    )
                for host in self._hosts.values():
                    host.refresh()
                    if host.refused:
                        raise ConfigError(host.refused)
                    if host.lost:
                        raise PlacementFailed(f"{host.name}: {host.lost}")
                time.sleep(0.02)
            for at, ref in asked.items():
                self._hosts[at].about = self._answer(at, ref)
        finally:
            shared.unlink(missing_ok=True)
        self._check_all([host.about for host in self._hosts.values() if host.about is not None])
        return True

    def _answer(self, at: int, reference: Any) -> About:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise PlacementFailed(
                f"{self._plan.bundles[at].name}: its host cannot be started on its node: {_first_lines(error)}. Is "
                "the same Millstream installed there, for the same Python?"
            ) from error

    def _check_all(self, found: Sequence[About]) -> None:
        """What must be the same, or shared, on all nodes. Raises ConfigError."""
        for about in found:
            if about.problem:
                raise ConfigError(f"{about.hostname} ({about.ip}): {about.problem}")
            if not about.sees_run_dir:
                raise ConfigError(
                    f'run.dir = "{self._run_dir}": {about.hostname} ({about.ip}) does not see what this machine writes '
                    "there; weights, checkpoints and claims lie in it, so it must be a folder that all nodes share "
                    "under the same path"
                )
            if refused := self._refuse(about):
                raise ConfigError(refused)

    def _refuse(self, about: About) -> str:
        """Also of a node that a bundle is moved to, while the run goes on."""
        where = f"{about.hostname} ({about.ip})"
        if about.version != version():
            return f"{where} has Millstream {about.version}, this one is {version()}: install the same on all nodes"
        if not self._config.log.url.startswith("file:"):
            return ""
        self._machine = self._machine or about.machine
        if about.machine == self._machine:
            return ""
        return (
            f"log.url = {self._config.log.url!r} is an embedded log, which the processes of one machine share, and "
            f"{where} is not the machine of the others; set log.url = kafka://host:port"
        )

    # ---------------------------------------------------------------- hosts
    def _host(self, at: int) -> HostHandle:
        """The host of a bundle; a new one where the last is lost."""
        found = self._hosts.get(at)
        if found is not None:
            found.refresh()
        if found is None or found.lost:
            self._hosts[at] = found = self._handle(at, self._make_host(at))
        return found

    def _make_host(self, at: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, placement = self._plan.bundles[at], self._config.placement
        options: dict[str, Any] = {
            "name": f"{self._job}/{bundle.name}/{secrets.token_hex(4)}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "num_gpus": bundle.gpus,
            "max_restarts": 0,  # how often is for the supervisor to decide
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, at),
        }
        return (
            self._ray.remote(Host)
            .options(**options)
            .remote(
                self._digest,
                at,
                self._plan.kind,
                self._job,
                unattended_s=placement.unattended_s,
                grace_s=self._config.supervisor.stop_grace_s,
            )
        )

    def _handle(self, at: int, actor: Any) -> HostHandle:
        return HostHandle(
            self._ray,
            actor,
            self._plan.bundles[at].name,
            start_timeout_s=self._config.placement.start_timeout_s,
            why_lost=self._why_lost,
            refuse=self._refuse,
        )

    def _why_lost(self, host: HostHandle, error: str) -> str:
        """In words for people: which node, or what there is no room for."""
        about = host.about
        if about is not None and not cluster.is_alive(self._ray, about.node):
            return f"its node {about.hostname} ({about.ip}) was lost"
        if not host.has_answered:
            bundle = next(each for each in self._plan.bundles if each.name == host.name)
            lacking = shortage(Plan(self._plan.kind, (bundle,)), cluster.nodes(self._ray))
            return "; ".join(part for part in (error, lacking) if part) or "its actor is being started"
        return f"its host actor has died: {_first_lines(error)}"

    def _give_back(self) -> None:
        """End every host and free the reservation. Twice is harmless."""
        ray = self._ray
        if ray is None:
            return
        for host in self._hosts.values():
            host.end()
        self._hosts.clear()
        try:
            self._unreserve()
        except ray.exceptions.RayError as error:
            logger.warning("the reservation %s cannot be given back: %s", self._job, _first_lines(error))
        if self._connected_here:
            ray.shutdown()
        self._ray, self._connected_here = None, False

    def _unreserve(self) -> None:
        if self._group is None:
            return
        (self._run_dir / JOB_FILE).unlink(missing_ok=True)
        self._ray.util.remove_placement_group(self._group)
        deadline = time.monotonic() + _REMOVED_S
        while self._state() != "REMOVED":
            if time.monotonic() > deadline:
                logger.warning("the reservation %s is not given back after %.0f s", self._job, _REMOVED_S)
                break
            time.sleep(0.05)
        self._group = None

    def _serve(self, spec: DaemonSpec) -> list[str]:
        return [
            *("-m", "engine.cli", "serve", spec.role, str(self._run_dir)),
            *("--replica", f"{spec.replica}/{spec.replicas}"),
        ]


def job_name(config: Config) -> str:
    """Of the reservation and the actors: the same for every supervisor of this run directory."""
    return f"{config.run.name}-{hashlib.sha256(config.run.dir.encode()).hexdigest()[:10]}"


def _digest(config: Config, wanted: Plan) -> str:
    """What daemons would be started with now: a job with another one is not attached to."""
    text = f"{version()}\n{wanted}\n{dump_toml(config)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _meeting(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """As torchrun would set them (engine/trainer/ranks.py). A rank sees one device alone, which is its first."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _first_lines(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])
