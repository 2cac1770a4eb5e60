"""`millstream config`: print the effective configuration."""

from __future__ import annotations

import argparse
import sys

from engine.commands import common

NAME = "config"
HELP = "print the effective configuration"
DESCRIPTION = """Print every setting with the value in force, as TOML: defaults, then the file, then
MILLSTREAM__section__key variables, then --set. Secrets are redacted. Exits with 2 and the
full key when a setting is unknown, of another type, or cannot hold together with another."""
EXAMPLE = """  millstream config runs/demo
  millstream config my.toml --set staleness.max_weight_staleness=4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)


def execute(args: argparse.Namespace) -> int:
    from engine.config import dump_toml

    sys.stdout.write(dump_toml(common.load(args)))
    return 0
