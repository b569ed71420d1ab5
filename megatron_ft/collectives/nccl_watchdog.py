"""Hook into the NCCL watchdog: its timeouts and errors become one event per epoch, instead of the end of the process.

NCCL's own watchdog times every collective, but by default it ends the process when one is late. :func:`environment`
makes it only record the failure; :class:`Watchdog` reads the records in a thread of its own and calls back once. gloo
has no watchdog, so the works passed to :meth:`Watchdog.watch` are timed and asked for their errors. The protocol
decides on an event's consequences; :func:`abort` ends a communicator.

Failures it assumes: a collective never ends, or fails; a communicator breaks; a peer reports that its own broke; a
process group is destroyed while it is watched; an abort, a shrink or the Flight Recorder hangs. Every call that can
hang runs in a thread that is abandoned after a deadline.

**What an abort does to results**: the aborted kernels return, and later events on their stream complete although the
data is garbage. So a bucket counts as finished only if the host saw its completion *before* the abort began, and only
this module may begin one: not the watchdog (ASYNC_ERROR_HANDLING 2), and not the training thread (``Work.wait`` with a
timeout aborts).

Not used: ``_register_on_completion_hook``, which takes the GIL for every collective and reports only those that ended.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ft.errors import ConfigError

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class WatchdogEvent:
    """The failure that broke an epoch. ``kind``: timeout, comm_error or remote_error; ``collectives``: newest last."""

    kind: str
    epoch: int
    message: str
    collectives: tuple[str, ...]


_KINDS = {"TIMEOUT": "timeout", "COMM_ERROR": "comm_error", "REMOTE_ERROR": "remote_error", "UNKNOWN": "comm_error"}
"""Names in torch's ``ErrorType`` and ``WorkResult`` for failures."""


@dataclass
class _Watched:
    """A watched work. ``outcome`` is a ``Future[WorkResult]`` if the backend has one, else the tensors' future."""

    name: str
    work: Any
    outcome: Any
    native: bool
    began_s: float
    state: str = "not ended"

    def end(self, state: str) -> None:
        self.state, self.work, self.outcome = state, None, None  # they hold tensors and the process group


@dataclass(frozen=True)
class _Finding:
    kind: str
    message: str
    native: bool


class Watchdog:
    """Watches the process groups of one epoch and calls back once. It is replaced with the epoch, never repaired.

    It keeps the groups alive until the event or :meth:`close`; close it before the last reference to one is dropped.

    Args:
        epoch: the view's number, copied into the event.
        groups: name -> process group or backend. Works of one without ``get_error`` (gloo) must be passed to
            :meth:`watch`.
        on_event: called once, in the watchdog's thread. It may close the watchdog.
        timeout_s: seconds that a watched work may take, from :meth:`watch`. NCCL's works have a timeout of their own,
            too.
        poll_s: seconds between two looks.
        keep: number of collectives that an event lists.
        clock: returns seconds, monotonic.
    """

    def __init__(
        self,
        epoch: int,
        groups: Mapping[str, Any],
        on_event: Callable[[WatchdogEvent], None],
        timeout_s: float,
        poll_s: float = 0.02,
        keep: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch, self._on_event, self._timeout_s = epoch, on_event, timeout_s
        self._poll_s, self._keep, self._clock = poll_s, keep, clock
        self._backends = [(name, backend) for name, group in groups.items() for backend in _reporting(group)]
        self._pending: list[_Watched] = []
        self._recent: deque[_Watched] = deque(maxlen=keep)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron_ft-watchdog", daemon=True)
        self._thread.start()

    def watch(self, work: Any, name: str) -> None:
        """Time a started torch ``Work`` and ask for its error. Callable from any thread; has no effect after the event.

        gloo's point-to-point works are only timed: they end in the thread that waits for them, which sees the error.
        A work captured in a CUDA graph must not be watched: it never reports its end.
        """
        outcome, native = _outcome_of(work)
        watched = _Watched(name, work, outcome, native, self._clock())
        with self._lock:
            if not self._stop.is_set():
                self._pending.append(watched)
                self._recent.append(watched)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Stop watching; may be repeated. Return False if a callback is running or stuck, True if none will run."""
        with self._lock:
            self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._poll_s):
                if (found := self._ask_works() or self._ask_backends()) is not None:
                    self._report(found)
                    break
        except Exception as error:  # the thread's outermost loop: a bug must not go unheard
            _log.warning(f"watchdog of epoch {self._epoch} ended: {error!r}")
        finally:
            with self._lock:
                self._stop.set()
                self._pending, self._backends = [], []
                self._recent.clear()

    def _ask_backends(self) -> _Finding | None:
        for name, backend in tuple(self._backends):
            try:
                error = backend.get_error().name
            except RuntimeError:
                self._backends.remove((name, backend))  # destroyed, or a wrapper around one that has no watchdog
                continue
            if error in _KINDS:
                return _Finding(_KINDS[error], f"{name}: the NCCL watchdog reports {error}", native=True)
        return None

    def _ask_works(self) -> _Finding | None:
        with self._lock:
            pending = tuple(self._pending)
        found = next((found for watched in pending if (found := self._ask(watched)) is not None), None)
        with self._lock:
            self._pending = [watched for watched in self._pending if watched.work is not None]
        return found

    def _ask(self, watched: _Watched) -> _Finding | None:
        failed = None
        if watched.outcome is None:
            ended = watched.work.is_completed()
        elif ended := watched.outcome.done():
            failed = _failure(watched.outcome, watched.native)
        if failed is not None:
            found = _Finding(failed[0], f"{watched.name}: {failed[1]}", watched.native)
            watched.end(failed[1])
            return found
        if ended:
            watched.end("ended")
            return None
        took_s = self._clock() - watched.began_s
        if took_s < self._timeout_s:
            return None
        watched.state = f"not ended after {took_s:.1f} s"
        return _Finding(
            "timeout", f"{watched.name}: {watched.state}; allowed are {self._timeout_s:g} s", watched.native
        )

    def _report(self, found: _Finding) -> None:
        with self._lock:
            registered = tuple(f"{watched.name}: {watched.state}" for watched in self._recent)
        collectives = (flight_recorder(self._keep) if found.native else ()) or registered
        with self._lock:
            if self._stop.is_set():
                return
        self._on_event(WatchdogEvent(found.kind, self._epoch, found.message, collectives))


def _reporting(group: Any) -> list[Any]:
    """Return the backends of a process group (or the backend itself) that report errors: NCCL's, not gloo's."""
    devices = () if hasattr(group, "get_error") else getattr(group, "_device_types", ())
    backends = [group._get_backend(device) for device in devices] or [group]
    return [backend for backend in backends if hasattr(backend, "get_error")]


def _outcome_of(work: Any) -> tuple[Any, bool]:
    """Return the future to ask, and True if it holds a ``WorkResult``. (None, False): only ``is_completed`` can be
    asked.

    NCCL's own future comes first: its other future is complete as soon as the kernel is queued. Both are read without a
    CUDA call, which could block behind a training thread that waits for the device.
    """
    for method, native in (("get_future_result", True), ("get_future", False)):
        try:
            return getattr(work, method)(), native
        except RuntimeError:
            continue  # this backend does not implement it
    return None, False


def _failure(outcome: Any, native: bool) -> tuple[str, str] | None:
    """Return kind and text of a completed future's failure."""
    try:
        value = outcome.value()
    except RuntimeError as error:
        # Its traceback would keep the process group, and so its sockets, alive.
        return "comm_error", (str(error.with_traceback(None)).splitlines() or ["failed without a word"])[0]
    result = _c10d().WorkResult(value).name if native else "SUCCESS"
    return (_KINDS[result], f"the NCCL watchdog reports {result}") if result in _KINDS else None


_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
"""Handlers of torch's debug server. The second is that of gloo and all others, the only one in a build without CUDA."""


def flight_recorder(keep: int, deadline_s: float = 1.0) -> tuple[str, ...]:
    """Return the last ``keep`` collectives that torch recorded, newest last; empty if none came within ``deadline_s``.

    ``_dump_nccl_trace_json`` would hold the GIL meanwhile, 0.4 s for 20000 entries and forever if CUDA blocks. The
    handlers of torch's debug server return the same and release it.
    """
    return _within(deadline_s, "megatron_ft-recorder", lambda: _recorded(keep)).value or ()


def _c10d() -> Any:
    """Return torch's C module; its stubs lack the parts that are used here."""
    return torch._C._distributed_c10d


def _recorded(keep: int) -> tuple[str, ...]:
    c10d = _c10d()
    answer: list[str | bytes] = []
    names = [name for name in _HANDLERS if name in c10d._get_handler_names()]
    request = type("Request", (c10d._Request,), {"body": lambda _: b"", "params": lambda _: {}})
    response = type(
        "Response",
        (c10d._Response,),
        {"set_content": lambda _, content, kind: answer.append(content), "set_status": lambda _, status: None},
    )
    c10d._get_handler(names[0])(request(), response())
    return tuple(_words(entry) for entry in json.loads(answer[0]).get("entries", [])[-keep:])


def _words(entry: Mapping[str, Any]) -> str:
    sequence = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    group = " ".join(word for word in entry["process_group"] if word)
    return f"{group} {entry['profiling_name']} #{sequence} {entry['input_sizes']} {entry['state']}".lstrip()


# --- after an event ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: str | None = None
    abandoned: bool = False


def _within(deadline_s: float, name: str, function: Callable[[], Any]) -> _Outcome:
    """Call in a thread that is abandoned after ``deadline_s``; the objects it holds live as long as it hangs."""
    outcomes: list[_Outcome] = []

    def run() -> None:
        try:
            outcomes.append(_Outcome(function()))
        except Exception as error:  # the thread's outermost: else it would look like a hang
            outcomes.append(_Outcome(error=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(deadline_s)
    return outcomes[0] if outcomes else _Outcome(abandoned=True)


def abort(group: Any, deadline_s: float) -> str:
    """Abort ``group`` (process group or backend). Return the error, or "".

    An abort that takes longer than ``deadline_s`` is abandoned in its thread, which keeps ``group`` alive: its
    destructor would wait for the abort. torch also reports an NCCL abort that took longer than the group's timeout as
    an error; it returns only when that abort is over.
    """
    outcome = _within(deadline_s, "megatron_ft-abort", group.abort)
    if outcome.abandoned:
        return f"the abort took longer than {deadline_s:g} s and was left behind"
    return outcome.error or ""
