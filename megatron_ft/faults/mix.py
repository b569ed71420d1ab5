"""Draw a schedule from the failures that large training jobs see; a pure function of its arguments.

The shares of the causes are those of ``causes``, so an injected and a simulated run suffer alike. Times between failures
are Weibull with shape 0.78, 3% of the groups carry half of the rate, 5% of the failures of a process or a node take a
rack. How a cause shows itself in a process is not published; ``_AS`` is our reading of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil, gamma
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.faults.causes import MIX
from megatron_ft.faults.schedule import Fault, Schedule

SHAPE = 0.78
FRAIL_SHARE, FRAIL_RATE = 0.03, 0.5
RACK_SHARE, RACK_GROUPS = 0.05, 4
FLAP_S = (5.0, 60.0)

_CRASH_POINTS = ("forward", "backward", "reduce", "gate", "update")
_AS: dict[str, tuple[tuple[str, float], ...]] = {
    "crash": (("kill", 0.6), ("exception", 0.3), ("oom", 0.1)),
    "node": (("kill", 1.0),),
    "hang": (("stop", 0.8), ("gil", 0.2)),
    "flap": (("stop", 1.0),),  # without a network of its own a rank is cut off by being stopped
    "straggler": (("slow", 1.0),),
    "corruption": (("bitflip", 0.99), ("nan", 0.01)),
    "maintenance": (("terminate", 1.0),),
}
_HANG_S = 1800.0
"""How long the GIL is held by a hang: as long as a default collective timeout lasts."""


def draw(count: int, seed: int, groups: int, every_s: float = 30.0) -> Schedule:
    """``count`` faults for a run of ``groups`` groups, ``every_s`` apart on average; the same seed, the same schedule.

    A drawn schedule may take more groups than there are; who injects it refuses what would leave too few.
    """
    for name, value, least in (("--mix", count, 1), ("groups", groups, 1)):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
    if not every_s > 0:
        raise ConfigError(f"--every-s is {every_s:g}; it must be greater than 0")
    rng = random.Random(f"mix/{seed}")
    frail = rng.sample(range(groups), max(1, ceil(FRAIL_SHARE * groups)))
    at, faults = 0.0, []
    for _ in range(count):
        at += rng.weibullvariate(every_s / gamma(1 + 1 / SHAPE), SHAPE)
        faults.append(_fault(rng, round(at, 3), groups, frail))
    return Schedule(tuple(faults), seed)


def _fault(rng: random.Random, after_s: float, groups: int, frail: Sequence[int]) -> Fault:
    cause = _pick(rng, MIX)
    group = rng.choice(frail) if rng.random() < FRAIL_RATE else rng.randrange(groups)
    if cause in ("crash", "node") and groups > 1 and rng.random() < RACK_SHARE:
        first = group - group % RACK_GROUPS
        rack = tuple(range(first, min(first + RACK_GROUPS, groups)))
        return Fault(kind="rack", groups=rack, after_s=after_s)
    kind = _pick(rng, _AS[cause])
    return Fault(kind=kind, group=group, after_s=after_s, **_details(rng, cause, kind))


def _details(rng: random.Random, cause: str, kind: str) -> dict[str, Any]:
    if cause == "node":
        return {"position": "all"}
    if cause == "crash":
        # A kill at any instant is mostly one in compute; at a named point the rarer instants get their turn.
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
