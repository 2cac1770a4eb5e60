"""Faults of a fleet as data: which engine is killed, frozen, sent away or added, when, and in which moment.

    plan(seed) ─► Fault(at_s, engine, how, after, delay_s, seconds) …      the same list for the same seed

A resident is an engine that the run's own supervisor starts again; a guest comes and goes: it is started by whoever
runs the schedule. However the seed falls, at least one engine is well by plan at any time, so the run has no reason
to stand still.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

KILL, FREEZE, FREEZE_KILL, LEAVE = "kill", "freeze", "freeze_kill", "leave"
MOMENTS = {  # the type of event that a fault is struck after → its topic
    "transfer_group_formed": "fleet",
    "engine_updating": "fleet",
    "engine_ready": "fleet",
    "weights_published": "ledger",
    "batch_cut": "ledger",
}
RECOVERS_S = 10.0  # by plan: from the end of a fault until the engine is at work again
APART_S = (3.0, 8.0)  # from one fault to the next
SHORT_S, LONG_S = (0.2, 2.0), (7.0, 14.0)  # of a freeze: within the signs of life, and beyond any deadline
AWAY_S = (2.0, 15.0)  # of a guest
MOST_DELAY_S = 0.06  # after the event: before, during and after a transfer


class Fault(NamedTuple):
    at_s: float  # not before, from the beginning of the schedule
    victim: str  # an engine, as "rollout-1", or "trainer-0"
    how: str
    after: str  # the event that it is struck after, once its time has come
    delay_s: float  # from that event
    seconds: float = 0.0  # a freeze lasts so long; a guest stays away so long (0: a resident)


def plan(
    seed: int,
    duration_s: float,
    residents: Sequence[str],
    guests: Sequence[str],
    *,
    trainer_every_s: float = 0.0,
) -> list[Fault]:
    """Faults of `duration_s` seconds. `trainer_every_s`: also kill the trainer about that often (0: never)."""
    draw = random.Random(seed)
    down_until = dict.fromkeys((*residents, *guests), 0.0)
    faults: list[Fault] = []
    at_s, trainer_at_s = 0.0, trainer_every_s or float("inf")
    while (at_s := at_s + draw.uniform(*APART_S)) < duration_s:
        if at_s >= trainer_at_s:
            trainer_at_s += trainer_every_s
            faults.append(_fault(draw, at_s, "trainer-0", KILL))
            continue
        well = [name for name, until in down_until.items() if until <= at_s]
        if len(well) < 2:
            continue
        victim = draw.choice(well)
        fault = _of_guest(draw, at_s, victim) if victim in guests else _of_resident(draw, at_s, victim)
        down_until[victim] = at_s + fault.seconds + RECOVERS_S
        faults.append(fault)
    return faults


def _of_resident(draw: random.Random, at_s: float, victim: str) -> Fault:
    how = draw.choices((KILL, FREEZE, FREEZE_KILL), (9, 8, 3))[0]
    return _fault(draw, at_s, victim, how, 0.0 if how == KILL else _freeze_s(draw))


def _of_guest(draw: random.Random, at_s: float, victim: str) -> Fault:
    how = draw.choices((KILL, LEAVE, FREEZE, FREEZE_KILL), (7, 6, 4, 3))[0]
    return _fault(draw, at_s, victim, how, draw.uniform(*AWAY_S) if how in (KILL, LEAVE) else _freeze_s(draw))


def _freeze_s(draw: random.Random) -> float:
    return draw.uniform(*draw.choice((SHORT_S, LONG_S)))


def _fault(draw: random.Random, at_s: float, victim: str, how: str, seconds: float = 0.0) -> Fault:
    after = draw.choice(sorted(MOMENTS))
    return Fault(
        round(at_s, 2), victim, how, after, round(draw.uniform(0.0, MOST_DELAY_S), 4), round(seconds, 2)
    )
