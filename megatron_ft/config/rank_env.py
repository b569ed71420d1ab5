"""The environment variables through which the launcher configures a rank. Agent and rank use the same names from
here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from megatron_ft import codec
from megatron_ft.config.schema import RunConfig
from megatron_ft.errors import LaunchError
from megatron_ft.types import seat
from megatron_ft.utils import process_name
from megatron_ft.utils.auth import secret as secrets
from megatron_ft.utils.auth.secret import Key, Secret

_PREFIX = "MEGATRON_FT_"
CLAIMS = "store"
"""Name of the claim log's directory (``run.store.claim_log``) in the run directory."""


AUDIT = f"{_PREFIX}AUDIT"


@dataclass(frozen=True)
class Audit:
    """The differences between a short run that checks a script (``proof.audit_run``) and any other run.

    Attributes:
        last: The last step, whatever the script asks for.
        digests: Step of whose microbatches all digests are recorded; -1: none.
        shards: Number of shards of a run without a checkpoint; 0: one for each group.
    """

    last: int
    digests: int = -1
    shards: int = 0

    def to_env(self) -> str:
        """Return the value of the variable ``AUDIT``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Audit | None:
        """Return what the variable says; None in a run that is no audit."""
        return cls(**json.loads(env[AUDIT])) if AUDIT in env else None


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place in the run.

    Attributes:
        run_id: Id of the run.
        group: Number of the group.
        position: Number of the rank in its group.
        store: Address of the control store, ``host:port`` or ``etcd://...``.
        address: Address by which ranks on other hosts reach this host.
        run_dir: Run directory.
        config: Settings of the run.
        incarnation: Number of this start of the group, from 0.
        copies: Addresses and ports of the agents that may have copies of checkpoints in memory.
        epoch: Epoch of the newest view that the agent knows.
        host_rank: Number of this host. None: the run has one host.
        claims: Whether the run keeps a claim log (``core.lifecycle.store_failover``).
        secret: Secret of the run.
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
    host_rank: int | None = None
    claims: bool = False
    secret: Secret = field(default_factory=lambda: secrets.here(), repr=False)

    @property
    def key(self) -> Key:
        """The key from which the keys of this run's connections are derived."""
        return self.secret.of(self.run_id)

    @property
    def seat(self) -> str:
        """Name of this start of the group. Its ranks use it to find each other, and none of an older start."""
        return seat(self.group, self.incarnation)

    def to_env(self) -> dict[str, str]:
        """Return the variables of one rank, with RANK and WORLD_SIZE of its group: an engine sees the group as the
        world.

        The agent adds the variables of the host.
        """
        values = {name: getattr(self, name) for name in _travels()}
        return {
            **{_variable(name): _text(value) for name, value in values.items()},
            secrets.VARIABLE: self.secret.text,
            "RANK": str(self.position),
            "WORLD_SIZE": str(self.config.ranks_per_group),
        }

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Inverse of :meth:`to_env`. Raises ``LaunchError`` in a process that ``megatron-ft launch`` has not
        started."""
        if not is_launched(env):
            raise LaunchError(
                "this process was not started by the launcher; start the script with "
                "`megatron-ft launch --groups N --config CONFIG --run-dir DIR SCRIPT -- ARGUMENTS`"
            )
        values = {name: _value(hint, env[_variable(name)]) for name, hint in _travels().items()}
        return cls(**values, secret=secrets.given(env) or secrets.here())


def _travels() -> dict[str, Any]:
    """Return the type of each field but the secret, which has a variable of its own."""
    return {name: hint for name, hint in get_type_hints(RankEnvironment).items() if name != "secret"}


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(codec.encode(value))


def _value(hint: Any, text: str) -> Any:
    return hint(text) if hint in (str, Path) else codec.decode(hint, json.loads(text))


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``megatron-ft launch`` has started this process."""
    return f"{_PREFIX}RUN_ID" in env


def name_process(name: str) -> None:
    """Name this process after its place in the run, for ``ps``; one that the launcher has not started keeps its name."""
    group, position = os.environ.get(f"{_PREFIX}GROUP"), os.environ.get(f"{_PREFIX}POSITION")
    if group is not None:
        process_name.take(f"group {group} rank {position} {name}", f"ft-g{group}-r{position}")
