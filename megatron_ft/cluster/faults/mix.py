"""Draws a schedule with the distribution of failures in large training jobs. Pure functions.

``causes`` has the shares of the causes, for injected and simulated runs. Times between failures are Weibull with shape
0.78; 3% of the groups have half of the failures; 5% of the failures of a process or a node take a rack. How a cause
affects a process is not published; ``_AS`` is an assumption.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from math import ceil, gamma
from typing import Any

from megatron_ft.cluster.faults.causes import MIX
from megatron_ft.cluster.faults.schedule import Fault, Schedule
from megatron_ft.errors import ConfigError

SHAPE = 0.78
FRAIL_SHARE, FRAIL_RATE = 0.03, 0.5
RACK_SHARE, RACK_GROUPS = 0.05, 4
FLAP_S = (5.0, 60.0)

_CRASH_POINTS = ("forward", "backward", "reduce", "gate", "update")
_AS: dict[str, tuple[tuple[str, float], ...]] = {
    "crash": (("kill", 0.6), ("exception", 0.3), ("oom", 0.1)),
    "node": (("kill", 1.0),),
    "hang": (("stop", 0.8), ("gil", 0.2)),
    "flap": (("stop", 1.0),),  # a rank without its own network is cut off by stopping it
    "straggler": (("slow", 1.0),),
    "corruption": (("bitflip", 0.99), ("nan", 0.01)),
    "maintenance": (("terminate", 1.0),),
}
_HANG_S = 1800.0
"""Duration of a hang that holds the GIL: the default timeout of a collective."""


def draw(count: int, seed: int, groups: int | Collection[int], every_s: float = 30.0, since_s: float = 0.0) -> Schedule:
    """Draws a schedule. The same arguments give the same schedule.

    It may take more groups than there are; the injector refuses faults that leave too few.

    Args:
        count: number of faults.
        seed: seed of the draw.
        groups: number of groups of the run, or the groups to draw from.
        every_s: mean time between faults in seconds.
        since_s: age of the run in seconds; all faults are later.

    Raises:
        ConfigError: an argument is out of range.
    """
    candidates = sorted(range(groups) if isinstance(groups, int) else groups)
    for name, value, least in (("--mix", count, 1), ("groups", len(candidates), 1)):
        if value < least:
            raise ConfigError(f"{name} is {value} and must be at least {least}")
    if not every_s > 0:
        raise ConfigError(f"--every-s is {every_s:g} and must be greater than 0")
    rng = random.Random(f"mix/{seed}")
    frail = rng.sample(candidates, max(1, ceil(FRAIL_SHARE * len(candidates))))
    at, faults = since_s, []
    for _ in range(count):
        at += rng.weibullvariate(every_s / gamma(1 + 1 / SHAPE), SHAPE)
        faults.append(_fault(rng, round(at, 3), candidates, frail))
    return Schedule(tuple(faults), seed)


def _fault(rng: random.Random, after_s: float, groups: Sequence[int], frail: Sequence[int]) -> Fault:
    cause = _pick(rng, MIX)
    group = rng.choice(frail) if rng.random() < FRAIL_RATE else rng.choice(groups)
    if cause in ("crash", "node") and len(groups) > 1 and rng.random() < RACK_SHARE:
        first = group - group % RACK_GROUPS
        rack = tuple(other for other in groups if first <= other < first + RACK_GROUPS)
        return Fault(kind="rack", groups=rack, after_s=after_s)
    kind = _pick(rng, _AS[cause])
    return Fault(kind=kind, group=group, after_s=after_s, **_details(rng, cause, kind))


def _details(rng: random.Random, cause: str, kind: str) -> dict[str, Any]:
    if cause == "node":
        return {"position": "all"}
    if cause == "crash":
        # A kill at a random moment mostly hits computing; named points also cover the rarer moments.
        return {"point": rng.choice(_CRASH_POINTS)} if kind != "kill" or rng.random() < 0.5 else {}
    if cause == "flap":
        return {"duration_s": round(rng.uniform(*FLAP_S), 3)}
    if kind == "gil":
        return {"duration_s": _HANG_S}
    if cause == "straggler":
        return {"factor": 1.1, "steps": rng.randint(20, 200)}
    return {}


def _pick(rng: random.Random, shares: Sequence[tuple[str, float]]) -> str:
    names, weights = zip(*shares, strict=True)
    return rng.choices(names, weights)[0]
