"""Named points of a step at which a fault can be injected into a live rank.

Unarmed, a point costs a comparison or two, and a ``stat`` fifty times a second. A rank is armed in two ways. At launch,
by the environment variable ``MEGATRON_FT_HOLD`` (a JSON list of holds). While it runs, by its *mailbox*, a file of
*orders* that the injector (``faults.execute``) writes and the rank looks at when a step begins, unless it has just done so.

A *hold* freezes the rank: it sends itself SIGSTOP, all its threads freeze in that instant, sockets open, collectives in
flight; the injector sees the stopped process and sends the real signal. All other orders are what only the process can do
to itself: raise, hold the GIL, compute slowly, corrupt a gradient. They are in the history before they happen, and what
cannot be recorded does not happen.

Failures it assumes: the injector can die or withdraw its orders at any time, so the mailbox is read again right before an
order is carried out. Groups are started again and pids used again, so a mailbox names the process it is for by pid and
start. A mailbox that cannot be read is an empty one.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_ft.errors import ConfigError
from megatron_ft.runtime import history

if TYPE_CHECKING:
    import torch

VARIABLE = "MEGATRON_FT_HOLD"
DIRECTORY = "faults"
"""Of the mailboxes, in the run directory."""

POINTS = (
    "begin", "forward", "backward", "reduce", "bucket", "gate", "update", "recover", "connect", "patch", "warm", "follow",
    "finish"
)  # fmt: skip
"""begin: the step starts; forward, backward: of a microbatch; reduce: the all-reduce of ``bucket`` has just been started;
bucket: ``bucket`` has been reduced; gate: after the last bucket; update: inside the optimizer's step; recover: the report
is published; connect: before the new communicator; patch: before a taken-over microbatch; warm: a group that comes back is
about to look for others; follow: it has asked for the state of ``step``; finish: all steps committed."""

ACTIONS = ("hold", "exception", "oom", "gil", "slow", "nan", "bitflip")
_CORRUPTIONS = ("nan", "bitflip")
_LOOKS = ("begin", "finish")
"""The points at which the mailbox is looked at."""
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Hold:
    """Stop a rank at ``point`` of ``step``, or of any; ``bucket`` narrows it further where the point has one.

    ``after``: when it has passed it so many times in that step before, e.g. two forward passes. ``incarnation``: which start
    of the group.
    """

    group: int
    step: int | None
    point: str
    bucket: int | None = None
    position: int = 0
    after: int = 0
    incarnation: int = 0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ConfigError(f"fault point {self.point!r} is not known; known are: {', '.join(POINTS)}")


def to_env(holds: list[Hold]) -> dict[str, str]:
    """The environment that arms these holds in the ranks of a launch."""
    return {VARIABLE: json.dumps([asdict(hold) for hold in holds])}


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a rank shall do to itself, once, when it reaches ``point``.

    ``fault`` names it in the record; empty for a hold of the environment. ``step`` None: of any step, ``bucket`` None: any
    (for a corruption: whichever ``seed`` draws). ``duration_s``: of ``gil``. ``factor``, ``steps``: how many times longer
    computing takes, and in how many steps (``slow``). ``what``: ``loss`` or ``gradient`` becomes NaN. ``bit``: which one is
    flipped, 0 the lowest; None: drawn. ``after``: as of a :class:`Hold`, of a certain step.
    """

    fault: str
    action: str
    point: str = "begin"
    step: int | None = None
    bucket: int | None = None
    duration_s: float = 0.0
    factor: float = 1.0
    steps: int = 1
    what: str = "gradient"
    bit: int | None = None
    seed: int = 0
    after: int = 0


class Corruptible(Protocol):
    """What a corruption needs of an engine: views, so that a change reaches what will be reduced."""

    def local_gradients(self) -> Sequence[torch.Tensor]:
        """The flat local gradient of each bucket, without anything else that is reduced with it."""

    def local_losses(self) -> Sequence[torch.Tensor]:
        """The sum of losses each bucket carries; tensors of one element."""


class InjectedError(RuntimeError):
    """Raised in the training thread on order. Not a user's error: it has to look like a bug."""


# --- the mailbox, used on both sides ----------------------------------------------------------------------------------


def mailbox(run_dir: Path, group: int, position: int) -> Path:
    """Where the orders for one rank are."""
    return run_dir / DIRECTORY / f"g{group}.p{position}.json"


def reached_file(run_dir: Path, group: int, position: int) -> Path:
    """Where a rank says, before it freezes, for which order it does."""
    return run_dir / DIRECTORY / f"g{group}.p{position}.reached"


def post(run_dir: Path, group: int, position: int, process: tuple[int, int], orders: Sequence[Order]) -> None:
    """Injector: replace the orders for a rank; ``process`` is its pid and :func:`start_of`. Raises ``OSError``."""
    path = mailbox(run_dir, group, position)
    path.parent.mkdir(exist_ok=True)
    _replace(path, {"process": list(process), "orders": [asdict(order) for order in orders]})


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names a process. Raises ``OSError``."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rsplit(")", 1)[1].split()[19])


def _replace(path: Path, value: object) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(temporary, path)


# --- the rank's side --------------------------------------------------------------------------------------------------


class Points:
    """The points of one rank; all methods are the training thread's."""

    def __init__(self, group: int, holds: list[Hold], *, position: int = 0, run_dir: Path | None = None) -> None:
        self._group, self._position, self._run_dir = group, position, run_dir
        mine = [hold for hold in holds if (hold.group, hold.position) == (group, position)]
        self._orders = [
            Order(fault="", action="hold", point=hold.point, step=hold.step, bucket=hold.bucket, after=hold.after)
            for hold in mine
        ]
        self._mailbox = None if run_dir is None else os.fspath(mailbox(run_dir, group, position))
        self._seen: tuple[int, int] | None = None
        self._looked = float("-inf")
        self._done: set[str] = set()
        self._slow: _Slow | None = None
        self._armed = bool(self._orders)

    @classmethod
    def from_env(cls, group: int, position: int | None = None, run_dir: Path | None = None) -> Points:
        """What is left out is taken from the launcher's environment (``runtime.environment``)."""
        raw, own = os.environ.get(VARIABLE), os.environ.get("MEGATRON_FT_RUN_DIR")
        if run_dir is None and own:
            run_dir = Path(own)
        if position is None:
            position = int(os.environ.get("MEGATRON_FT_POSITION", "0"))
        incarnation = int(os.environ.get("MEGATRON_FT_INCARNATION", "0"))
        holds = [Hold(**hold) for hold in json.loads(raw)] if raw else []
        holds = [hold for hold in holds if hold.incarnation == incarnation]
        return cls(group, holds, position=position, run_dir=run_dir)

    def reach(self, point: str, step: int, bucket: int | None = None) -> None:
        """Called by the runtime; returns at once unless an order matches, which works only once.

        Raises ``InjectedError`` or ``torch.OutOfMemoryError`` when that was ordered.
        """
        if self._mailbox is not None and point in _LOOKS:
            self._look()
        if not self._armed:
            return
        if self._slow is not None:
            self._slow = self._slow.pace(step, computes=point in ("forward", "backward"))
        for order in list(self._orders):
            if order.action not in _CORRUPTIONS and order.point == point and _fits(order, step, bucket):
                if order.after:
                    self._orders[self._orders.index(order)] = replace(order, after=order.after - 1)
                else:
                    self._carry_out(order, step, bucket)
        self._armed = bool(self._orders) or self._slow is not None

    def corrupts(self, step: int) -> bool:
        """Whether a gradient of that step is to be corrupted: what it is in must not have been sent before."""
        return self._armed and any(o.action in _CORRUPTIONS and _fits(o, step, None) for o in self._orders)

    def corrupt(self, step: int, engine: Corruptible) -> None:
        """Called by the session after each computed microbatch; changes the engine's local gradients if ordered."""
        if not self._armed:
            return
        if self._slow is not None:
            self._slow = self._slow.pace(step, computes=False)
        for order in [order for order in self._orders if order.action in _CORRUPTIONS and _fits(order, step, None)]:
            if self._still_stands(order):
                gradients = engine.local_gradients()
                change = _NaN(order, gradients) if order.action == "nan" else _Bitflip(order, gradients)
                if self._record(order, f"{change}, step {step}"):
                    change.make(engine.local_losses())
        self._armed = bool(self._orders) or self._slow is not None

    def _look(self) -> None:
        """Take in what the mailbox holds now, if it is another one than at the last look."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            status = os.stat(self._mailbox)
            seen = (status.st_ino, status.st_mtime_ns)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        posted = [order for order in self._read() if order.fault not in self._done] if seen is not None else []
        self._orders = [order for order in self._orders if not order.fault] + posted
        self._armed = bool(self._orders) or self._slow is not None

    def _read(self) -> list[Order]:
        try:
            value = json.loads(Path(self._mailbox).read_text(encoding="utf-8"))
            if tuple(value["process"]) != (os.getpid(), start_of(os.getpid())):
                return []
            return [Order(**order) for order in value["orders"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f"megatron_ft: fault orders in {self._mailbox} ignored: {error}", file=sys.stderr, flush=True)
            return []

    def _still_stands(self, order: Order) -> bool:
        """Nothing is done twice, and nothing that was withdrawn since."""
        if order.fault:
            self._look()
            if order not in self._orders:
                return False
            self._done.add(order.fault)
        self._orders.remove(order)
        return True

    def _carry_out(self, order: Order, step: int, bucket: int | None) -> None:
        if order.action == "hold":
            self._freeze(order, step, bucket)
            return
        where = f"{describe(order.point, bucket)}, step {step}"
        if not self._still_stands(order) or not self._record(order, where):
            return
        match order.action:
            case "exception":
                raise InjectedError(f"injected fault {order.fault} at {where}")
            case "oom":
                import torch

                raise torch.OutOfMemoryError(f"injected fault {order.fault} at {where}: no device memory was asked for")
            case "gil":
                hold_gil(order.duration_s)
            case "slow":
                self._slow = _Slow(step + order.steps, order.factor)

    def _freeze(self, order: Order, step: int, bucket: int | None) -> None:
        """The reason first, then the last look, then the freeze: who withdraws the order sees one of the two."""
        if order.fault:
            value = {"fault": order.fault, "process": [os.getpid(), start_of(os.getpid())]}
            try:
                _replace(
                    reached_file(self._run_dir, self._group, self._position),
                    {**value, "at": f"{describe(order.point, bucket)}, step {step}"},
                )
            except OSError:
                return  # nobody would know what it waits for
        if self._still_stands(order):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _record(self, order: Order, where: str) -> bool:
        try:
            history.append(
                self._run_dir,
                "inject",
                group=self._group,
                position=self._position,
                pid=os.getpid(),
                signal=None,
                point=where,
                kind=order.action,
                fault=order.fault,
            )
        except OSError:
            return False
        return True


def _fits(order: Order, step: int, bucket: int | None) -> bool:
    anywhere = order.bucket is None or order.action in _CORRUPTIONS
    return order.step in (None, step) and (anywhere or order.bucket == bucket)


def describe(point: str, bucket: int | None) -> str:
    return point if bucket is None else f"{point} {bucket}"


def hold_gil(duration_s: float) -> None:
    """Sleep without letting any other Python thread run, as a C extension that forgot to release the GIL does."""

    class _Timespec(ctypes.Structure):
        _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

    whole = int(duration_s)
    # One call for all of it: between two calls the interpreter would hand the GIL over. PyDLL does not release it.
    ctypes.PyDLL(None).nanosleep(ctypes.byref(_Timespec(whole, int((duration_s - whole) * 1e9))), None)


@dataclass(frozen=True)
class _Slow:
    """Computing takes ``factor`` times as long as it does, before step ``until``: every part of it is slept after."""

    until: int
    factor: float
    since: float | None = None

    def pace(self, step: int, computes: bool) -> _Slow | None:
        """At the end of one part of a step; ``computes``: what begins now is forward or backward. None: it is over."""
        if self.since is not None:
            time.sleep((time.perf_counter() - self.since) * (self.factor - 1))
        if step >= self.until:
            return None
        return _Slow(self.until, self.factor, time.perf_counter() if computes else None)


class _NaN:
    """One element of a gradient, or all that a loss of NaN makes so."""

    def __init__(self, order: Order, gradients: Sequence[torch.Tensor]) -> None:
        self._whole, self._gradients = order.what == "loss", gradients
        self._bucket, self._element = _draw(order, gradients, random.Random(order.seed))

    def __str__(self) -> str:
        return "NaN as loss" if self._whole else f"NaN in element {self._element} of bucket {self._bucket}"

    def make(self, losses: Sequence[torch.Tensor]) -> None:
        if not self._whole:
            self._gradients[self._bucket][self._element] = float("nan")
            return
        for tensor in (*self._gradients, *losses):
            tensor.fill_(float("nan"))


class _Bitflip:
    """One bit of one element of a gradient."""

    def __init__(self, order: Order, gradients: Sequence[torch.Tensor]) -> None:
        rng = random.Random(order.seed)
        self._bucket, self._element = _draw(order, gradients, rng)
        self._gradient = gradients[self._bucket]
        self._bits = 8 * self._gradient.element_size()
        drawn = rng.randrange(self._bits)
        self._bit = drawn if order.bit is None else order.bit % self._bits

    def __str__(self) -> str:
        return f"bit {self._bit} of element {self._element} of bucket {self._bucket}"

    def make(self, losses: Sequence[torch.Tensor]) -> None:
        import torch

        kind = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[self._bits]
        value = 1 << self._bit
        if self._bit == self._bits - 1 and self._bits > 8:
            value -= 1 << self._bits  # the sign, as a number of this signed type
        self._gradient.view(kind)[self._element] ^= value


def _draw(order: Order, gradients: Sequence[torch.Tensor], rng: random.Random) -> tuple[int, int]:
    bucket = rng.randrange(len(gradients))
    if order.bucket is not None:
        bucket = order.bucket % len(gradients)
    return bucket, rng.randrange(gradients[bucket].numel())
