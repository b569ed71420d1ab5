"""What the launcher tells a rank, as environment variables. One place for the names, used on both sides."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.config import RunConfig
from megatron_ft.errors import LaunchError

_PREFIX = "MEGATRON_FT_"


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place in the run.

    ``store``: of the control store, ``host:port`` or ``etcd://...``; ``address``: of this host, by which other hosts' ranks
    reach it. ``incarnation`` numbers the starts of the group, from 0. ``copies``: of the agents that may have copies of
    checkpoints in memory, address and port. ``epoch``: of the newest view that the agent knows.
    """

    run_id: str
    group: int
    position: int
    store: str
    address: str
    run_dir: Path
    config: RunConfig
    incarnation: int = 0
    copies: tuple[tuple[str, int], ...] = ()
    epoch: int = 0

    @property
    def seat(self) -> str:
        """Names this start of the group: what its ranks meet under, so that they meet none of an older one."""
        return seat(self.group, self.incarnation)

    def to_env(self) -> dict[str, str]:
        """Our variables, plus the usual ones scoped to the group: to any engine the group is the world.

        The agent adds those of the host.
        """
        return {
            f"{_PREFIX}RUN_ID": self.run_id,
            f"{_PREFIX}GROUP": str(self.group),
            f"{_PREFIX}POSITION": str(self.position),
            f"{_PREFIX}INCARNATION": str(self.incarnation),
            f"{_PREFIX}EPOCH": str(self.epoch),
            f"{_PREFIX}STORE": self.store,
            f"{_PREFIX}ADDRESS": self.address,
            f"{_PREFIX}RUN_DIR": str(self.run_dir),
            f"{_PREFIX}COPIES": json.dumps(self.copies),
            f"{_PREFIX}CONFIG": json.dumps(self.config.to_json()),
            "RANK": str(self.position),
            "WORLD_SIZE": str(self.config.ranks_per_group),
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Raises ``LaunchError`` outside of ``megatron-ft launch``."""
        if f"{_PREFIX}RUN_ID" not in env:
            raise LaunchError(
                "this process was not started by the launcher; start the script with "
                "`megatron-ft launch --groups N --config CONFIG --run-dir DIR SCRIPT -- ARGUMENTS`"
            )
        return cls(
            run_id=env[f"{_PREFIX}RUN_ID"],
            group=int(env[f"{_PREFIX}GROUP"]),
            position=int(env[f"{_PREFIX}POSITION"]),
            store=env[f"{_PREFIX}STORE"],
            address=env[f"{_PREFIX}ADDRESS"],
            run_dir=Path(env[f"{_PREFIX}RUN_DIR"]),
            config=RunConfig.from_json(json.loads(env[f"{_PREFIX}CONFIG"])),
            incarnation=int(env[f"{_PREFIX}INCARNATION"]),
            copies=tuple(map(tuple, json.loads(env[f"{_PREFIX}COPIES"]))),
            epoch=int(env[f"{_PREFIX}EPOCH"]),
        )


def seat(group: int, incarnation: int) -> str:
    """As keys and file names have it: ``3``, and ``3.2`` for the second start again."""
    return f"{group}.{incarnation}" if incarnation else str(group)
