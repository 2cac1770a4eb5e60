"""`millstream doctor`: try out what this machine, its accelerator, log and network can do."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.commands import common
from streams.errors import ConfigError

if TYPE_CHECKING:
    from engine.doctor.result import Request
    from engine.doctor.runner import Probe
    from engine.settings import Config

NAME = "doctor"
HELP = "try out what this machine, its accelerator, log and network can do"
DESCRIPTION = """Probe the accelerator, the collective library, SGLang, Megatron and its patch, the weight
sync, the log, the network and the model, each in a process of its own with a deadline, and say of each: pass, warn,
fail or skip, what was seen, and what to do. With CONFIG (a TOML file or a run directory) what that
configuration needs is probed; without, this machine. Nothing is written to a run's topics; a probe
that writes a file removes it. Exit code 1 if a probe failed.

Other nodes are seen through a Ray cluster (--address), or, without Ray, by `millstream doctor CONFIG
--serve PORT` on each of them and --peer HOST:PORT here. A node that serves answers for 30 minutes,
to anyone who reaches that port: it connects back to whoever asks and touches marked files in run.dir,
nothing else."""
EXAMPLE = """  millstream doctor
  millstream doctor my.toml --deep --record docs/node-a.md
  millstream doctor my.toml --peer 10.0.0.2:29400 --peer 10.0.0.3:29400
  millstream doctor my.toml --json | jq '.probes[] | select(.status == "fail")'"""
_SERVE_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="TOML file, or a run directory (optional)"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="override a setting"
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also what is slow: an SGLang server, a broadcast, a round through Kafka",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write the Markdown page to keep")
    parser.add_argument(
        "--only", metavar="PROBE", action="append", default=[], help="this probe alone; may be repeated"
    )
    parser.add_argument(
        "--address", metavar="RAY", default="", help="Ray cluster (default: RAY_ADDRESS, if it is set)"
    )
    parser.add_argument(
        "--peer",
        metavar="HOST:PORT",
        action="append",
        default=[],
        dest="peers",
        help="a node that serves; may be repeated",
    )
    parser.add_argument(
        "--serve", metavar="[HOST:]PORT", help="answer the doctor of another node, for 30 minutes"
    )


def execute(args: argparse.Namespace) -> int:
    from engine.doctor import about, report, runner

    request = _request(args)
    if args.serve:
        return _serve(request, args.serve)
    probes = _probes(args.only, request)

    def told(finding: runner.Finding) -> None:
        if not args.json:
            sys.stdout.write(report.line(finding))
            sys.stdout.flush()

    findings = runner.run(probes, request, told=told)
    if args.json or args.record:
        command = ["millstream", *sys.argv[1:]]
        machine = about.about(command)
        if args.record:
            args.record.parent.mkdir(parents=True, exist_ok=True)
            args.record.write_text(report.as_markdown(findings, machine), encoding="utf-8")
        if args.json:
            sys.stdout.write(report.as_json(findings, machine))
    if not args.json:
        sys.stdout.write(f"{report.totals(findings)}\n")
    return 1 if report.has_failed(findings) else 0


def _request(args: argparse.Namespace) -> Request:
    from engine.doctor.peers import NoPeer, split
    from engine.doctor.result import Request

    if args.overrides and not args.config:
        raise ConfigError("--set overrides a setting of CONFIG; name one")
    config: Config | None = common.load(args) if args.config else None
    try:
        for peer in args.peers:
            split(peer)
    except NoPeer as error:
        raise ConfigError(str(error)) from None
    address = args.address or os.environ.get("RAY_ADDRESS", "")
    if address and args.peers:
        raise ConfigError(
            "--peer and a Ray address (--address, RAY_ADDRESS) are two ways to see other nodes; use one"
        )
    return Request(
        config=config or _standing_in(),
        has_config=config is not None,
        deep=args.deep,
        address=address,
        peers=tuple(args.peers),
    )


def _standing_in() -> Config:
    """Where no configuration was given: the defaults, the folders of the current directory."""
    from engine.settings import Config, RewardConfig

    return Config(reward=RewardConfig(function="exact"))  # the one setting without a usable default


def _probes(only: list[str], request: Request) -> list[Probe]:
    """All, or those that were named. Raises ConfigError."""
    from engine.doctor.probes import PROBES

    known = {probe.name: probe for probe in PROBES}
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: no such probe; known: {', '.join(known)}")
    wanted = {*only, "accelerator"} if any(known[name].lane == "device" for name in only) else set(only)
    return [probe for probe in PROBES if not only or probe.name in wanted]


def _serve(request: Request, where: str) -> int:
    from engine.doctor.operations import operations_of
    from engine.doctor.peers import PeerServer

    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--serve {where}: needed PORT or HOST:PORT")
    operations = operations_of(request.config)
    stop = common.StopFlag().install()
    try:
        server = PeerServer(host, int(port), operations)
    except OSError as error:
        raise ConfigError(f"--serve {where}: {error.strerror or error}; choose a port that is free") from None
    with server:
        address = f"{server.server_address[0]}:{server.server_address[1]}"
        print(f"serving at {address} for {_SERVE_S / 60:.0f} minutes; Ctrl-C ends it", flush=True)
        server.serve(stop.is_set, _SERVE_S)
    return 130 if stop.interrupted else 0
