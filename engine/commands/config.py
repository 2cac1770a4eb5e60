"""`millstream config`: print the effective configuration."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from engine.commands import common

if TYPE_CHECKING:
    from engine.settings import Config

NAME = "config"
HELP = "print the effective configuration"
DESCRIPTION = """Print every setting with the value in force, as TOML: defaults, then the file, then
MILLSTREAM__section__key variables, then --set. Secrets are redacted. With a log on Kafka, the options
that its client library is given follow as comments. Exits with 2 and the full key when a setting
is unknown, of another type, without effect, or cannot hold together with another. A setting that is
derived from others unless it is set (global_batch_size, max_open_groups, …) is shown as unset."""
EXAMPLE = """  millstream config runs/demo
  millstream config my.toml --set staleness.max_weight_staleness=4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_config(parser)


def execute(args: argparse.Namespace) -> int:
    from engine.config import dump_toml

    config = common.load(args)
    sys.stdout.write(dump_toml(config))
    if config.log.url.startswith("kafka:"):
        sys.stdout.write(client_options(config))
    return 0


def client_options(config: Config) -> str:
    """What the Kafka clients of a daemon are given, as comments: TOML in and after them stays readable."""
    from engine.log_settings import kafka_settings
    from streams.kafka.options import effective

    settings = kafka_settings(config)
    lines = [
        "",
        f"# Options of the Kafka client ({settings.client}) in each daemon, made from [log] and [log.kafka].",
    ]
    if config.log.kafka.ingest == "auto":
        lines.append(
            f"# ingest: {kafka_settings(config, 'trainer').ingest} in the trainer, {settings.ingest} elsewhere"
        )
    for client, options in effective(settings).items():
        lines += ["#", f"# {client}", *(f"#   {name} = {value}" for name, value in options.items())]
    return "\n".join(lines) + "\n"
