"""This node's own address and network card, before any other node is asked."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from engine.doctor.result import Request, Result, failed, passed, skipped, warned

NIC_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "cni", "flannel", "tunl", "dummy")
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


def node_address(request: Request) -> Result:
    """What the hostname resolves to: Gloo binds it, and Ray announces it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = f"enter the node's address for {name} in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        verdict = failed if request.has_other_nodes else warned
        return verdict(f"the hostname {name} cannot be resolved: {error}", remedy)
    if ipaddress.ip_address(address).is_loopback:
        if request.has_other_nodes:
            return failed(
                f"{name} resolves to {address}, which no other node reaches",
                "enter the node's own address in /etc/hosts; Ray: --node-ip-address; set weights.master_address",
            )
        return passed(f"{name} resolves to {address}: right on one machine, not with other nodes")
    return passed(f"{name} resolves to {address}")


def training_card(request: Request) -> Result:
    return judge_card(request, interfaces(), os.environ)


def judge_card(request: Request, found: Mapping[str, str], environ: Mapping[str, str]) -> Result:
    """`found`: interface → `address/prefix`, of those that are up."""
    named = {name: environ[name] for name in NIC_VARIABLES if environ.get(name)}
    wanted = {name: _plain(value) for name, value in named.items()}
    for name, value in wanted.items():
        if value not in found:
            return failed(
                f"{name}={named[name]!r}, but the interfaces that are up and have an IPv4 address are "
                f"{_listed(found)}",
                f"set {name} to one of them, the same network on every node",
            )
    if len(set(wanted.values())) > 1:
        return warned(
            f"the libraries are told different interfaces: {named}",
            "set all of them to the training network's, unless that is meant",
        )
    real = {name: address for name, address in found.items() if not name.startswith(_VIRTUAL)}
    if wanted:
        value = next(iter(wanted.values()))
        return passed(
            f"{', '.join(named)}: {value} is up, {found[value]}", interface=value, address=found[value]
        )
    if not request.has_other_nodes:
        return skipped(f"one node; its interfaces: {_listed(found)}")
    if len(real) > 1:
        return failed(
            f"none of {', '.join(NIC_VARIABLES)} is set, and there are several interfaces: {_listed(real)}",
            "set them to the training network's interface, on every node",
        )
    return passed(f"one interface: {_listed(real or found)}")


def refusal(address: str, timeout_s: float) -> str:
    """Why nothing at HOST:PORT takes a connection from here; "" when something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def interfaces() -> dict[str, str]:
    """Those that are up, with their first IPv4 address and its prefix length. Linux; elsewhere {}."""
    found: dict[str, str] = {}
    root = Path("/sys/class/net")
    if not root.is_dir():
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for folder in sorted(root.iterdir()):
            try:
                state = (folder / "operstate").read_text().strip()
                address = _ask(asking, folder.name, _SIOCGIFADDR)
                mask = _ask(asking, folder.name, _SIOCGIFNETMASK)
            except OSError:
                continue  # it has no IPv4 address
            if state in ("up", "unknown"):
                prefix = ipaddress.ip_network(f"0.0.0.0/{mask}").prefixlen
                found[folder.name] = f"{address}/{prefix}"
    return found


def _ask(asking: socket.socket, interface: str, what: int) -> str:
    answer = fcntl.ioctl(asking.fileno(), what, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _plain(value: str) -> str:
    """`=eth0` and `eth0,eth1` are ways in which NCCL may be told."""
    return value.lstrip("=^").split(",")[0].split(":")[0]


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in found.items()) or "none"
