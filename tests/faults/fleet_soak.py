"""Ten minutes of kills, freezes and additions over a fleet of engines, audited.

python -m tests.faults.fleet_soak [--minutes 10] [--seed 0] [--transport disk|distributed|both] [--log embedded|kafka]
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from streams.broker.node import Node
from tests.faults.fleet_harness import GUESTS, RESIDENTS, Summary, configuration, soak
from tests.faults.fleet_plan import plan

KINDS = {"disk": "delta", "distributed": "full"}


def on(folder: Path, transport: str, log: str, minutes: float, seed: int, trainer_every_s: float) -> Summary:
    faults = plan(seed, 60 * minutes, RESIDENTS, GUESTS, trainer_every_s=trainer_every_s)
    if log == "embedded":
        config = configuration(folder, transport=transport, kind=KINDS[transport])
        return soak(config, faults, seed=seed, duration_s=60 * minutes)
    node = Node(folder / "kafka", port=0)
    node.start()
    try:
        url = f"kafka://{node.address}/fleet{seed}."
        return soak(
            configuration(folder, transport=transport, kind=KINDS[transport], log_url=url),
            faults,
            seed=seed,
            duration_s=60 * minutes,
        )
    finally:
        node.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of faults, on each transport (default 10)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=("disk", "distributed", "both"), default="both")
    parser.add_argument("--log", choices=("embedded", "kafka"), default="embedded")
    parser.add_argument(
        "--trainer-every", type=float, default=120.0, metavar="S", help="kill the trainer too (0: never)"
    )
    parser.add_argument("--out", type=Path, default=Path("fleet.json"), help="default: fleet.json")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: a temporary folder)")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    results: list[Summary] = []
    with tempfile.TemporaryDirectory() as temporary:
        base = options.folder or Path(temporary)
        for transport in ("disk", "distributed"):
            if options.transport in (transport, "both"):
                folder = base / transport
                result = on(
                    folder, transport, options.log, options.minutes, options.seed, options.trainer_every
                )
                results.append(result)
                print(result.as_json(), end="", flush=True)
    options.out.write_text("".join(each.as_json() for each in results), encoding="utf-8")
    return 1 if any(each.problems for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
