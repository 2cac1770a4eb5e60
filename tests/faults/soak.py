"""`make soak`: a long schedule of kills over a real run on both logs. Prints a summary and keeps it as JSON.

python -m tests.faults.soak [--kills 80] [--seed 0] [--log embedded|kafka|both] [--out FILE] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from streams.broker.node import Node
from tests.faults.harness import BROKER, Summary, broker_of, configuration, plan, soak
from tests.faults.test_kills import DAEMONS


def on_embedded(folder: Path, kills: int, seed: int) -> Summary:
    return soak(configuration(folder), plan(seed, kills, DAEMONS), seed=seed)


def on_kafka(folder: Path, kills: int, seed: int) -> Summary:
    node = Node(folder / "kafka", port=0)
    node.start()
    try:
        config = configuration(folder, f"kafka://{node.address}/soak{seed}.")
        return soak(config, plan(seed, kills, (*DAEMONS, BROKER)), seed=seed, broker=broker_of(node))
    finally:
        node.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--kills", type=int, default=80, help="faults on each log, of which a fifth are stops (default 80)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", choices=("embedded", "kafka", "both"), default="both")
    parser.add_argument("--out", type=Path, default=Path("soak.json"), help="default: soak.json")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: a temporary folder)")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    results: list[Summary] = []
    with tempfile.TemporaryDirectory() as temporary:
        base = options.folder or Path(temporary)
        for name, run in (("embedded", on_embedded), ("kafka", on_kafka)):
            if options.log in (name, "both"):
                (base / name).mkdir(parents=True, exist_ok=True)
                results.append(run(base / name, options.kills, options.seed))
                print(results[-1].as_json(), end="", flush=True)
    options.out.write_text(
        json.dumps([each._asdict() for each in results], indent=1) + "\n", encoding="utf-8"
    )
    return 1 if any(each.problems for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
