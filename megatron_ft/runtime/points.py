"""Named points of a step at which a rank can be made to stop, so that somebody else can kill it exactly there.

Unarmed, reaching a point costs one comparison. Armed by the environment variable ``MEGATRON_FT_HOLD`` (a JSON list of
holds), a rank that reaches a matching point sends itself SIGSTOP: all its threads freeze in that instant, sockets open,
collectives in flight. The injector sees the stopped process and sends the real signal (``faults.inject``).
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass

from megatron_ft.errors import ConfigError

VARIABLE = "MEGATRON_FT_HOLD"

POINTS = ("begin", "forward", "backward", "reduce", "bucket", "gate", "update", "recover", "connect", "patch", "finish")
"""begin: the step starts; forward, backward: of a microbatch; reduce: the all-reduce of ``bucket`` has just been started;
bucket: ``bucket`` has been reduced; gate: after the last bucket; update: inside the optimizer's step; recover: the report
is published; connect: before the new communicator; patch: before a taken-over microbatch; finish: all steps committed."""


@dataclass(frozen=True)
class Hold:
    """Stop ``group`` at ``point`` of ``step``; ``bucket`` narrows it further where the point has one."""

    group: int
    step: int
    point: str
    bucket: int | None = None

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ConfigError(f"fault point {self.point!r} is not known; known are: {', '.join(POINTS)}")


def to_env(holds: list[Hold]) -> dict[str, str]:
    """The environment that arms these holds in the ranks of a launch."""
    return {VARIABLE: json.dumps([asdict(hold) for hold in holds])}


class Points:
    """The points of one rank."""

    def __init__(self, group: int, holds: list[Hold]) -> None:
        self._holds = [hold for hold in holds if hold.group == group]

    @classmethod
    def from_env(cls, group: int) -> Points:
        raw = os.environ.get(VARIABLE)
        return cls(group, [Hold(**hold) for hold in json.loads(raw)] if raw else [])

    def reach(self, point: str, step: int, bucket: int | None = None) -> None:
        """Called by the runtime; returns at once unless a hold matches, which works only once."""
        if not self._holds:
            return
        for hold in self._holds:
            if hold.point == point and hold.step == step and hold.bucket in (None, bucket):
                self._holds.remove(hold)
                os.kill(os.getpid(), signal.SIGSTOP)
                return
