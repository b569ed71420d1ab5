"""A run of one process, without a launcher: for a debugger, a notebook, or a test of the training script.

This process founds the run by itself: an embedded control store, a run directory that is deleted at its end, and the keys
that an agent writes otherwise. It is the only rank of the only group, and computes all microbatches of every step.

Failures it assumes: none is masked. No agent watches the process, and no other process takes over its work.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ft import codec
from megatron_ft.config import launch_environment
from megatron_ft.config import schema as config_module
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.record import run_directory
from megatron_ft.run import checkpoint, progress_counters
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.store import ControlStore
from megatron_ft.run.store.tcp_store import host
from megatron_ft.utils import directory_lock, net
from megatron_ft.utils.auth.secret import Secret

_log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 10.0
_OF_SEVERAL_GROUPS = ("policy", "redundancy", "placement", "failure_domains", "store", "min_groups", "rejoin")
"""Settings of ``fault_tolerance`` that have no meaning with one group."""
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_held = ExitStack()
"""What the last standalone run of this process holds."""
atexit.register(lambda: _held.close())


@cache
def _server() -> tuple[Any, str, int]:
    """Return the control store of this process, its address and its port.

    It is never dropped, not even while the interpreter ends: a daemon thread that its end would wake up in a call could
    not return to an interpreter that is gone, and would abort the process.
    """
    address = net.loopback()
    server, port = host(address, 0)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    return server, address, port


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise ``LaunchError`` in a job of several processes or hosts that another launcher, or a service, has started:
    each process would train alone."""
    found = launch_environment.find(environ)
    if found is None:
        return
    hosts = "several hosts, perhaps" if found.hosts is None else f"{found.hosts} hosts"
    raise LaunchError(
        f"{found.name} has {hosts}, with {found.processes} processes each, for this job, and `megatron-ft launch` has "
        f"started none of them; start the script with `megatron-ft launch --groups N --config CONFIG --run-dir DIR SCRIPT "
        f"-- ARGUMENTS`, once on each host. megatron_ft.init(standalone=True) trains in each process alone"
    )


def found(path: str | Path | None) -> RankEnvironment:
    """Found a run of this process, and return its environment. It ends with the process, or with the next call.

    Args:
        path: config file of the run, or None for the defaults. A step has the same microbatches as with several groups
            if ``train_batch_size`` is given. Settings that only several groups use are ignored.

    Raises:
        ConfigError: a setting is wrong, or the config needs several ranks in a group.
        CheckpointError: the checkpoint directory is used by another run, or cannot be read.
    """
    _held.close()
    raw = config_module.read(path)
    run_id = uuid.uuid4().hex[:12]
    config = _alone(raw)
    origin = _origin(config.fault_tolerance.checkpoint.directory, run_id)
    if origin is not None:
        config = _alone(raw, origin.meta["shards"])
    place = _held.enter_context(tempfile.TemporaryDirectory(prefix="megatron_ft-", ignore_cleanup_errors=True))
    run_dir = run_directory.prepare(Path(place), overwrite=False)
    _, address, port = _server()
    secret = Secret.new()
    store = ControlStore(net.joined(address, port), run_id, _STORE_TIMEOUT_S, secret=secret)
    store.begin()
    store.set("view/0", first_view(1, origin.step if origin else 0).to_wire())
    if origin is not None:
        store.set(restore.KEY, codec.encode(origin))
        _log.info(f"the run goes on from {origin.path}, before step {origin.step}")
    run_directory.write_config(run_dir, {"run_id": run_id, **config.to_json()})
    counters = run_dir / "counters"
    progress_counters.create(counters)
    os.environ[progress_counters.VARIABLE] = str(counters)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return RankEnvironment(
        run_id=run_id,
        group=0,
        position=0,
        store=net.joined(address, port),
        address=address,
        run_dir=run_dir,
        config=config,
        secret=secret,
    )


def _alone(raw: Mapping[str, Any], shards: int | None = None) -> RunConfig:
    """Return the config for one group with one rank. ``shards``: those of a checkpoint; by default a step has the
    microbatches that ``train_batch_size`` gives."""
    section = raw.get("fault_tolerance", {})
    if isinstance(section, Mapping):
        raw = {**raw, "fault_tolerance": {name: v for name, v in section.items() if name not in _OF_SEVERAL_GROUPS}}
    batch = [size for name in _BATCH if isinstance(size := raw.get(name), int) and size > 0]
    if shards is None and len(batch) == len(_BATCH):
        shards = max(1, batch[0] // (batch[1] * batch[2]))
    config = config_module.resolve(raw, groups=1, shards=shards)
    if config.ranks_per_group > 1:
        raise ConfigError(
            f"the config needs {config.ranks_per_group} ranks in a group, and this script was started as one process; "
            f"start it with `megatron-ft launch`, or give a config without pipeline and tensor parallelism"
        )
    return config


def _origin(directory: str, run_id: str) -> restore.Origin | None:
    """Take the checkpoint directory, if there is one, and return the newest complete checkpoint there."""
    if not directory:
        return None
    lock = directory_lock.lock(Path(directory), run_id)
    _held.callback(lock.release)
    newest = checkpoint.newest(Path(directory), _log.info)
    return None if newest is None else restore.Origin.of(newest)
