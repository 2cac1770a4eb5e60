"""Which devices a process may see: the variables that hide the others, and the check that they did. No torch here.

    a launcher is given ids ──► variables_for(kind, ids) ──► environment of the process, before torch is imported
    the process itself      ──► check(environ): it sees exactly what it was given, or ConfigError

Hiding works only before the device's library is loaded. A mask that came late, or not at all, shows up as an unknown
device error in the middle of a run, or as two processes on one device: so it is checked first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from streams.errors import ConfigError

# The first one counts; MTHREADS_VISIBLE_DEVICES is what the container toolkit of the vendor looks at.
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "musa": ("MUSA_VISIBLE_DEVICES", "MTHREADS_VISIBLE_DEVICES"),
}
GIVEN = "MILLSTREAM_GIVEN_DEVICES"  # "musa:0,3": what a launcher gave to this process; absent: nobody gave anything


def kind_of(device: str) -> str:
    """
    >>> kind_of("cuda:1"), kind_of("cpu")
    ('cuda', 'cpu')
    """
    return device.partition(":")[0]


def variables_for(kind: str, ids: Sequence[str]) -> dict[str, str]:
    """The environment of a process that may see these devices alone; without ids it sees none.

    >>> variables_for("musa", ["0", "3"])["MUSA_VISIBLE_DEVICES"]
    '0,3'
    """
    mask = ",".join(ids)
    return {**dict.fromkeys(VARIABLES[kind], mask), GIVEN: f"{kind}:{mask}"}


def ids_on_node(kind: str, assigned: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The device ids behind what Ray has assigned to an actor, whose environment is `environ`.

    For CUDA, Ray's ids are those of the node's own mask already. Stock Ray knows no MUSA: it counts from 0 whatever
    the node's mask is, so that the numbers are places in that mask. A Ray that does know it (Moore Threads' own) has
    narrowed the mask to the very ids.

    Raises ConfigError when the mask has fewer devices than Ray was told.

    >>> ids_on_node("musa", ["1"], {"MUSA_VISIBLE_DEVICES": "4,6"}), ids_on_node("musa", ["1"], {})
    (['6'], ['1'])
    """
    names = VARIABLES[kind]
    outer = _listed(environ.get(names[0])) if names else None
    if kind == "cuda" or outer is None or set(outer) == set(assigned):
        return list(assigned)
    try:
        return [outer[int(place)] for place in assigned]
    except (IndexError, ValueError) as error:
        raise ConfigError(
            f"Ray has assigned {kind} device {','.join(assigned)} of a node whose {names[0]} = {','.join(outer)!r} "
            f"lists {len(outer)}: start Ray there with --num-gpus={len(outer)}, or widen {names[0]}"
        ) from error


def check(environ: Mapping[str, str]) -> None:
    """Before torch is imported: does this process see exactly the devices that it was given? Raises ConfigError.

    A process that was given none by a launcher passes.
    """
    if GIVEN not in environ:
        return
    kind, _, given = environ[GIVEN].partition(":")
    for name in VARIABLES.get(kind, ()):
        seen = environ.get(name)
        if seen != given:
            raise ConfigError(
                f"{name} is {'not set' if seen is None else repr(seen)}, and this process was given {given!r}: it "
                f"would use devices of others; something between the launcher and this process (a wrapper, a shell "
                f"profile, sitecustomize) changes {name}: remove that"
            )
    if "torch" in sys.modules:
        raise ConfigError(
            f"torch was imported before {kind} devices {given!r} were set apart for this process: a sitecustomize or "
            ".pth file of this Python imports it; remove that"
        )


def _listed(mask: str | None) -> list[str] | None:
    """None: there is no mask, every device is seen."""
    return None if mask is None else [each.strip() for each in mask.split(",") if each.strip()]
