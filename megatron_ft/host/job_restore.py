"""The checkpoint that a launch goes on from.

A launch with ``checkpoint.directory`` goes on from the newest complete checkpoint there; without one it begins anew.
The number of shards of a step comes from the checkpoint and not from ``--groups``, so the config is resolved with it,
on every host alike; host 0 alone reads all of the checkpoint's files, and announces which checkpoint it is.

Failures it assumes: checkpoints that are unfinished or damaged, a directory that cannot be read or belongs to another
job, a config that has changed since. A checkpoint that cannot be used is reported before any process starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.config import megatron_arguments, megatron_lm_arguments
from megatron_ft.config import schema as config_module
from megatron_ft.config.rank_env import Audit
from megatron_ft.config.schema import CheckpointConfig, FaultToleranceConfig, RunConfig
from megatron_ft.core.lifecycle import restart_policy, run_ending
from megatron_ft.errors import CheckpointError
from megatron_ft.types import given
from megatron_ft.utils.console import say

if TYPE_CHECKING:
    from megatron_ft.core.lifecycle.checkpoint_policy import Found
    from megatron_ft.run.checkpoint.restore import Origin

AUTO, NEVER = "auto", "never"
_KNOWN_BY_SCRIPT = ("fault_tolerance.seed",)
"""A script may set these itself; its ranks compare them."""


def config(
    path: Path | None,
    groups: int,
    ranks_per_group: int | None,
    failure_domains: Sequence[str] | None = None,
    megatron: Sequence[str] | None = None,
    unchanged: bool = False,
) -> RunConfig:
    """Return the run's config, with the number of shards of the checkpoints, with the given failure domains where
    the file names none, and with what the arguments ``megatron`` of a script of Megatron-LM say, which runs ``unchanged`` or
    has a loop of its own. Raises ``FTError``."""
    raw = config_module.read(path)
    section = raw.get("fault_tolerance", {})
    auto = config_module.AUTO
    if failure_domains and isinstance(section, Mapping) and section.get("failure_domains", auto) == auto:
        raw = {**raw, "fault_tolerance": {**section, "failure_domains": list(failure_domains)}}
    found = _any(raw)
    audit = Audit.from_env()
    shards = (audit.shards or None if audit else None) if found is None else _meta(found)["shards"]
    if megatron is not None and unchanged:
        raw = megatron_arguments.settings_of_script(raw, megatron, shards or groups, ranks_per_group)
        megatron_lm_arguments.changed(megatron)
    elif megatron is not None:
        raw = megatron_arguments.settings(raw, megatron, shards or groups)
    run = config_module.resolve(raw, groups=groups, ranks_per_group=ranks_per_group, shards=shards)
    if found is not None:
        _check(run, found)
    return run


def _any(raw: Mapping[str, Any]) -> Found | None:
    """Return the newest checkpoint that looks complete, without having read it."""
    section = raw.get("fault_tolerance")
    settings = section.get("checkpoint") if isinstance(section, Mapping) else None
    directory = settings.get("directory") if isinstance(settings, Mapping) else None
    if not isinstance(directory, str) or not directory or not _newest(directory):
        return None
    from megatron_ft.run import checkpoint  # imports torch, so only when it is needed

    return next((found for found in checkpoint.find(Path(directory)) if found.complete), None)


def _newest(directory: str) -> str:
    """Return the name of the newest checkpoint, complete or not; "" where there is none."""
    try:
        return max((name for name in os.listdir(directory) if name.startswith("step-")), default="")
    except OSError:
        return ""  # the process that takes the lock there reports what is wrong


def newest(settings: CheckpointConfig) -> str:
    """Return the name of the newest checkpoint, complete or not, the run's or the script's; "" where there is none."""
    return _newest(settings.directory) or megatron_lm_arguments.newest(settings.script_directory)


def _meta(found: Found) -> Mapping[str, Any]:
    meta = found.manifest["meta"]
    if not isinstance(meta, Mapping) or "shards" not in meta:
        raise CheckpointError(
            f"checkpoint {found.path} does not say which run it is of: it was not written by a run; name another "
            f"checkpoint.directory"
        )
    return meta


def _check(run: RunConfig, found: Found) -> None:
    from megatron_ft.run.checkpoint import restore

    meta = _meta(found)
    restore.check_division(run, found)
    restore.check(run, found.path, meta, but=_KNOWN_BY_SCRIPT)


def whole_job(settings: FaultToleranceConfig) -> int | None:
    """Return the starts of the whole job that are allowed in an hour; None without checkpoints, where it is never started
    again."""
    return settings.rejoin.restarts_per_hour if settings.checkpoint.resumable else None


def choose(run: RunConfig, mode: str) -> Origin | None:
    """Return the checkpoint that the run goes on from; None for a run that begins. Its directory is locked for the run
    (``run_lock.Claims``). Raises ``FTError``."""
    settings = run.fault_tolerance.checkpoint
    if not settings.directory:
        return None
    from megatron_ft.run import checkpoint
    from megatron_ft.run.checkpoint import restore
    from megatron_ft.run.checkpoint.memory_copies import GB, ReplicaCache, nowhere

    place, memory_gb = Path(settings.directory), settings.memory_gb
    if mode == NEVER and any(found.complete for found in checkpoint.find(place)):
        raise CheckpointError(
            f"--resume never, but checkpoint.directory {place} holds checkpoints of another run, and the newest by step "
            f"is what a later start goes on from; name another directory, or move its step-* directories away"
        )
    found = checkpoint.newest(place, say, ReplicaCache(place, memory_gb * GB).find if memory_gb else nowhere)
    if found is None:
        return None
    _check(run, found)
    say(f"the run goes on from {found.path}, before step {found.step}")
    return restore.Origin.of(found)


_BY_HAND = (
    "with several hosts this launcher does not start the whole job again. When it has ended on all of them, run the same "
    "command on every host, and the run goes on from the newest checkpoint (launch --ssh, supervise and array jobs do so by "
    "themselves)"
)


class WholeJob:
    """The whole job as one that may be lost, like a group: with ``rejoin`` its launcher restarts it from a checkpoint.

    Only on one host: the agents of several hosts would have to agree on it first. There the last line names the remedy.
    """

    def __init__(self, run: RunConfig, hosts: int) -> None:
        settings = run.fault_tolerance
        self._checkpoints = settings.checkpoint
        self._anew = config_module.policy_of(run).wipes_out
        self._may = (settings.rejoin.enabled or self._anew) and self._checkpoints.resumable
        self._hosts = hosts
        self._per_hour = settings.rejoin.restarts_per_hour
        self._state = restart_policy.Group(since=time.monotonic())
        self._saved = newest(self._checkpoints)

    def again(self, code: int) -> bool:
        """Return whether to start the job once more; waits until that is due. ``code``: exit code of the last start."""
        if not (run_ending.starts_again(code) and self._may):
            return False
        saved, before = newest(self._checkpoints), self._saved
        if not self._anew and not saved:
            return False
        if self._hosts > 1:
            say(_BY_HAND)
            return False
        if saved != before:  # the job has made progress: no reason to wait longer each time
            self._saved, self._state = saved, replace(self._state, quick=0)
        loss = restart_policy.Loss(self._state.incarnation, "died", "every group was taken down")
        self._state = restart_policy.lost(self._state, loss, time.monotonic(), self._per_hour)
        if self._state.never:
            say(f"the whole job is not started again: {self._state.never}")
            return False
        time.sleep(max(0.0, given(self._state.due) - time.monotonic()))
        self._state = restart_policy.started(self._state, time.monotonic())
        say(
            f"the run is wiped out: the whole job is started again, for the {len(self._state.again)}. time within an hour"
        )
        return True
