"""NCCL's own watchdog: it only records failures, which :func:`failure` reads; :func:`abort_all` ends communicators.

NCCL's watchdog times every collective, but by default it ends the process when one is late. :func:`environment` makes it
only record the failure. The process groups of an engine are looked at regularly (``run.collectives.user_process_groups``).

Failures it assumes: a communicator breaks; a peer reports that its own broke; a process group is destroyed while it is
looked at; an abort hangs.

**What an abort does to results**: the aborted kernels return, and later events on their stream complete although the
data is garbage. So a bucket counts as finished only if the host saw its completion *before* the abort began, and only
this package may begin one: not the watchdog (ASYNC_ERROR_HANDLING 2), and not the training thread (``Work.wait`` with a
timeout aborts).

Not used: ``_register_on_completion_hook``, which takes the GIL for every collective and reports only those that ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatron_ft.errors import ConfigError
from megatron_ft.utils import deadline

_OFF, _ON = "0|n|no|f|false", "1|y|yes|t|true"
_SETTINGS = (
    # Names (the first that is set counts), our value ("": keep torch's default), allowed (a pattern), and the reason.
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "0",
        "1 and 3 end the process, 2 aborts unasked",
    ),
    # The dump's signal stays in the store and reaches the kill switch of every rank that finds it, even much later.
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", _OFF, "after its dump NCCL's monitor ends the process"),
    # With it off TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC only says when a line is logged.
    ("TORCH_NCCL_ENABLE_MONITORING", "0", _OFF, "the monitor ends the process when NCCL's watchdog is held up"),
    # The watchdog sleeps four times as long (60 s by default), holding a lock that every new collective needs.
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1", "1?[0-9]?[0-9]", "collectives cannot start meanwhile"),
    ("TORCH_NCCL_PROPAGATE_ERROR", "1", f"{_OFF}|{_ON}", "it lets the peers of a broken group know"),
    (
        "TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE",
        "512",
        "[0-9]+",
        "the number of collectives that are remembered",
    ),
    ("TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT", "", _OFF, "with it NCCL starts no watchdog"),
    ("TORCH_NCCL_DESYNC_DEBUG NCCL_DESYNC_DEBUG", "", _OFF, "it turns ASYNC_ERROR_HANDLING back to 3"),
    ("TORCH_DISTRIBUTED_DEBUG", "", "off|info", "DETAIL turns ASYNC_ERROR_HANDLING back to 3"),
)


def environment(present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to ``present`` before torch makes a rank's first NCCL process group.

    Variables that are set keep their values. Raises ``ConfigError`` naming every value that would silence the watchdog.
    """
    added, problems = {}, []
    for names, value, allowed, why in _SETTINGS:
        name = next((name for name in names.split() if name in present), None)
        if name is None and value:
            added[names.split()[0]] = value
        elif name is not None and not re.fullmatch(allowed, present[name], re.IGNORECASE):
            problems.append(f"{name}={present[name]!r} must match {allowed}, because {why}; unset it")
    if problems:
        raise ConfigError("the environment does not let the NCCL watchdog report: " + ". ".join(problems))
    return added


def names() -> list[str]:
    """Return the names of all variables that :func:`environment` knows."""
    return [name for several, *_ in _SETTINGS for name in several.split()]


_KINDS = {"TIMEOUT": "timeout", "COMM_ERROR": "comm_error", "REMOTE_ERROR": "remote_error", "UNKNOWN": "comm_error"}
"""Names in torch's ``ErrorType`` for failures."""


def reporting(group: Any) -> list[Any]:
    """Return the backends of a process group that report errors and can be aborted: NCCL's, not gloo's."""
    backends = {id(backend): backend for device in group._device_types if (backend := group._get_backend(device))}
    # From torch 2.15 on gloo's has get_error, too, and says nothing by it. Agents import this module, and not torch.
    own = [backend for backend in backends.values() if type(backend).__name__ != "ProcessGroupGloo"]
    return [backend for backend in own if hasattr(backend, "get_error")]


def set_timeout(backend: Any, seconds: float) -> None:
    """Set the time limit of the operations that follow."""
    own = getattr(backend, "_set_default_timeout", None)  # torch's second back end of NCCL has another name for it
    (own or backend.set_timeout)(timedelta(seconds=seconds))


def failure(backend: Any) -> tuple[str, str] | None:
    """Return kind (timeout, comm_error or remote_error) and text of the failure that NCCL has recorded, if there is one."""
    try:
        error = backend.get_error().name
    except RuntimeError:  # destroyed, or a wrapper around one that has no watchdog
        return None
    return (_KINDS[error], f"the NCCL watchdog reports {error}") if error in _KINDS else None


def abort_all(backends: Mapping[str, Any], deadline_s: float) -> tuple[dict[str, str], list[str]]:
    """Abort all ``backends`` at the same time. Return the errors, and the names of those whose abort has not returned.

    One after the other would hang: in NCCL an abort may wait for ranks that abort another communicator first. An abort
    that takes longer than ``deadline_s`` is left behind in its thread, which keeps the backend alive: its destructor
    would wait for the abort. torch also reports an abort that took longer than the group's timeout as an error; it
    returns only when that abort is over.
    """
    until = time.monotonic() + deadline_s
    begun = {name: deadline.Call(f"megatron_ft-abort-{name}", backend.abort) for name, backend in backends.items()}
    outcomes = {name: call.within(until - time.monotonic()) for name, call in begun.items()}
    errors = {name: outcome.error for name, outcome in outcomes.items() if outcome.error}
    return errors, [name for name, outcome in outcomes.items() if outcome.abandoned]
