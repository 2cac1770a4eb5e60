"""What several nodes must agree on: ports both ways, shared folders, clocks, versions, subnets."""

from __future__ import annotations

import ipaddress
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.doctor.embedded import PREFIX, scratch, write_synced
from engine.doctor.operations import SEEN_S, services_of
from engine.doctor.peers import Node, NoPeer, nodes, pairs
from engine.doctor.result import Request, Result, failed, passed, skipped, warned
from engine.settings import Config

_ALONE = "one node (name others with --peer HOST:PORT, or a Ray cluster with --address)"
_FIREWALL = "open it in both directions between all nodes; Gloo, NCCL and MCCL also use any port of "
_LONGEST_SKEW_S, _NOTABLE_SKEW_S = 1.0, 0.2
_MUST_AGREE = (
    "python",
    "millstream",
    "torch",
    "torch_musa",
    "megatron-core",
    "transformers",
    "sglang",
    "ray",
)


def alone(request: Request) -> str:
    return "" if request.has_other_nodes else _ALONE


def ports(request: Request) -> Result:
    """The fixed ports of the configuration, and one of the ephemeral range that collectives use."""
    fixed = fixed_ports(request.config)
    taken = [f"{what} = {port}" for what, port in fixed.items() if _is_taken(port)]
    if taken:
        return failed(
            f"something listens already at {', '.join(taken)}",
            "a run that is on holds its ports: stop it, or choose other ports (0: any free one)",
        )
    if not request.has_other_nodes:
        told = ", ".join(f"{what} = {port}" for what, port in fixed.items())
        return passed(f"free here: {told}") if fixed else skipped(f"no fixed ports, and {_ALONE}")
    closed, tried = [], 0
    with nodes(request) as found:
        for source, target in pairs(found, is_ray=bool(request.address)):
            for what, port in {"an ephemeral port": 0, **fixed}.items():
                tried += 1
                if why := _crosses(source, target, port):
                    closed.append(f"{source.name} → {target.name}, {what}: {why}")
    if closed:
        return _closed_ways(closed, tried, _FIREWALL + _range())
    return passed(f"{tried} connections between {len(found)} nodes, each in both directions")


def fixed_ports(config: Config) -> dict[str, int]:
    found = {}
    if config.weights.master_port:
        found["weights.master_port"] = config.weights.master_port
    if config.rollout.backend == "sglang" and config.rollout.sglang.port and not config.rollout.sglang.url:
        for replica in range(config.rollout.replicas):
            found[f"rollout.sglang.port of replica {replica}"] = config.rollout.sglang.port + replica
    return found


def _crosses(source: Node, target: Node, port: int) -> str:
    """ "" when a connection from one to the other is taken."""
    address = target.address_for(source)
    try:
        opened = target.ask("listen", port=port, at=address)
    except (NoPeer, OSError) as error:
        return f"cannot be listened at: {error}"
    return _asked(source, "connect", host=address, port=opened)


def _asked(source: Node, operation: str, **where: Any) -> str:
    """ "" when that node could connect."""
    try:
        return source.ask(operation, **where)
    except (NoPeer, OSError) as error:
        return f"was not tried: {error}"


def _closed_ways(closed: Sequence[str], tried: int, remedy: str) -> Result:
    return failed(f"{len(closed)} of {tried} ways are closed: {'; '.join(closed[:6])}", remedy)


def no_cluster(request: Request) -> str:
    return "" if request.address else "no Ray cluster (name one with --address)"


def ray_ports(request: Request) -> Result:
    """What listens on every node of a Ray cluster while it is up, and its head's GCS."""
    closed, tried = [], 0
    with nodes(request) as found:
        for source, target in pairs(found, is_ray=True):
            for what, port in target.ports.items():
                tried += 1
                if why := _asked(source, "connect", host=target.address, port=port):
                    closed.append(f"{source.name} → {target.name}, {what} ({port}): {why}")
    if closed:
        return _closed_ways(
            closed,
            tried,
            "open them between all nodes; `ray start` fixes them: --port, --node-manager-port, --object-manager-port, "
            "and those of workers with --min-worker-port and --max-worker-port",
        )
    if not tried:
        return skipped("a cluster of one node")
    return passed(f"{tried} connections to Ray's own ports on {len(found)} nodes")


def no_services(request: Request) -> str:
    return alone(request) or (
        "" if services_of(request.config) else "neither a server to join nor a broker has an address here"
    )


def services(request: Request) -> Result:
    """Whether every node reaches what the configuration names by address."""
    closed, wanted = [], services_of(request.config)
    with nodes(request) as found:
        for node in found:
            for what, address in wanted.items():
                if why := _asked(node, "reach", address=address):
                    closed.append(f"{node.name} → {address} ({what}): {why}")
    if closed:
        return _closed_ways(
            closed,
            len(wanted) * len(found),
            "name an address that every node resolves and reaches, no loopback one; let the server listen beyond it "
            "(SGLang: --host 0.0.0.0); open the port",
        )
    return passed(f"{len(found)} nodes reach {', '.join(wanted.values())}")


def shared_folders(request: Request) -> Result:
    """run.dir: written, synced, renamed here; with other nodes, each must see the others' files in time."""
    folder = Path(request.config.run.dir)
    try:
        with scratch(folder) as place:
            write_synced(place / "whole", b"shared")
    except OSError as error:
        return failed(
            f"run.dir = {folder}: {error.strerror} ({error.filename})",
            "weights and checkpoints go there on every log: name a folder that you may write to",
        )
    if not request.has_other_nodes:
        return skipped(f"run.dir can be written; {_ALONE}")
    slowest, wrong = 0.0, []
    with nodes(request) as found:
        for writer in found:
            name, text = PREFIX + uuid.uuid4().hex, uuid.uuid4().hex
            try:
                writer.ask("place", folder="run.dir", name=name, text=text)
            except (NoPeer, OSError) as error:
                wrong.append(f"{writer.name} cannot write: {error}")
                continue
            for reader in found:
                seen, waited = reader.ask("see", folder="run.dir", name=name)
                slowest = max(slowest, waited)
                if seen != text:
                    wrong.append(f"{reader.name} does not see the file of {writer.name} within {SEEN_S:g} s")
            writer.ask("remove", folder="run.dir", name=name)
        wrong += _models(found, request.config)
    if wrong:
        return failed(
            "; ".join(wrong[:6]),
            "run.dir must be one folder that all nodes share, under the same path, and model.path the same files; "
            "an object store's mount may need its refresh",
        )
    return passed(f"{len(found)} nodes see one another's files in run.dir, the slowest after {slowest:.2f} s")


def _models(found: Sequence[Node], config: Config) -> list[str]:
    if not config.model.path:
        return []
    held = [(node, node.ask("digest", folder="model.path")) for node in found]
    first, files = held[0]
    return [
        f"model.path of {node.name} differs from that of {first.name}: {_differing(files, theirs)}"
        for node, theirs in held[1:]
        if theirs != files
    ]


def _differing(ours: dict[str, str], theirs: dict[str, str]) -> str:
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return ", ".join(names[:5]) + ("" if len(names) <= 5 else f" and {len(names) - 5} more")


def clocks(request: Request) -> Result:
    """The offset of each clock from ours, by the middle of the shortest of five round trips."""
    skews = []
    with nodes(request) as found:
        for node in found:
            if not node.is_here:
                skews.append((_skew(node), node.name))
    worst, name = max(skews, key=lambda each: abs(each[0]), default=(0.0, ""))
    said = f"largest difference {worst:+.3f} s ({name})" if skews else "no other node"
    if abs(worst) >= _LONGEST_SKEW_S:
        return failed(
            said, "run chrony or ntpd on every node: record times, retention and deadlines go by them"
        )
    if abs(worst) >= _NOTABLE_SKEW_S:
        return warned(
            said, "chrony or ntpd keeps clocks within milliseconds; ages in reports are off by so much"
        )
    return passed(said)


def _skew(node: Node) -> float:
    best = (float("inf"), 0.0)
    for _ in range(5):
        before = time.time()
        theirs = node.ask("clock")
        after = time.time()
        best = min(best, (after - before, theirs - (before + after) / 2))
    return best[1]


def equal_versions(request: Request) -> Result:
    with nodes(request) as found:
        said = [(node.name, node.ask("hello")["versions"]) for node in found]
    return judge_versions(said)


def judge_versions(said: Sequence[tuple[str, dict[str, str]]]) -> Result:
    """`said`: (node, its versions)."""
    unequal, minor = [], []
    for package in sorted({package for _, theirs in said for package in theirs} - {"system"}):
        held = {node: theirs.get(package, "absent") for node, theirs in said}
        if len(set(held.values())) > 1:
            text = f"{package}: " + ", ".join(f"{version} on {node}" for node, version in held.items())
            (unequal if package in _MUST_AGREE else minor).append(text)
    if unequal:
        return failed(
            "; ".join(unequal + minor), "install the same versions on every node, best from one image"
        )
    if minor:
        return warned("; ".join(minor), "best from one image on every node")
    return passed(f"{len(said)} nodes have the same versions of {len(said[0][1]) - 1} packages")


def subnets(request: Request) -> Result:
    """Do the interfaces of all nodes share a network?"""
    with nodes(request) as found:
        said = [(node.name, node.ask("hello")["interfaces"]) for node in found]
    return judge_subnets(said)


def judge_subnets(said: Sequence[tuple[str, dict[str, str]]]) -> Result:
    networks = [
        {
            str(ipaddress.ip_interface(address).network)
            for address in theirs.values()
            if not ipaddress.ip_interface(address).is_loopback
        }
        for _, theirs in said
    ]
    common = set.intersection(*networks) if networks else set()
    if common:
        return passed(f"{len(said)} nodes share the network {', '.join(sorted(common))}")
    listed = "; ".join(f"{name}: {', '.join(theirs.values()) or 'none'}" for name, theirs in said)
    return warned(
        f"no network is common to all nodes: {listed}",
        "set GLOO_SOCKET_IFNAME and NCCL_/MCCL_SOCKET_IFNAME to interfaces that reach one another; routed networks "
        "are slower",
    )


def _is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _range() -> str:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return "the ephemeral range"
    return f"the ephemeral range {low} to {high}"
