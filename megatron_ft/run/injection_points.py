"""Named points of a step at which a fault can be injected into a live rank.

Without orders a point costs one or two comparisons, and a ``stat`` at most fifty times per second. A rank gets orders
in two ways: at launch, by the environment variable ``MEGATRON_FT_HOLD`` (a JSON list of holds), and while it runs, by
its *mailbox*, a file of *orders* that ``cluster.faults.injector`` writes and the rank reads when a step begins.

A *hold* freezes the rank: it sends itself SIGSTOP, and all its threads freeze at once, with open sockets and
collectives in flight; the injector sees the stopped process and sends the actual signal. Other orders are faults that
only the process itself can cause: raise an exception, hold the GIL, compute slowly, corrupt a gradient. They are
recorded before they happen; an order that cannot be recorded is not carried out.

Failures assumed: the injector dies or withdraws its orders at any time, so the mailbox is read again right before an
order is carried out. Groups are restarted and pids reused, so a mailbox names its process by pid and start time. An
unreadable mailbox counts as empty.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ft.errors import ConfigError
from megatron_ft.record import history
from megatron_ft.types import given
from megatron_ft.utils import shared_file
from megatron_ft.utils.process_status import start_of

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

VARIABLE = "MEGATRON_FT_HOLD"
DIRECTORY = "faults"
"""Subdirectory of the run directory with the mailboxes."""

POINTS = (
    "begin", "forward", "backward", "reduce", "bucket", "gate", "update", "recover", "connect", "patch", "warm", "follow",
    "finish"
)  # fmt: skip
"""begin: a step starts; forward, backward: of a microbatch; reduce: the all-reduce of ``bucket`` has just been started;
bucket: ``bucket`` has been reduced; gate: after the last bucket; update: inside the optimizer's step; recover: the
report is published; connect: before the new communicator is built; patch: before a reassigned microbatch; warm: a
returning group is about to look for the others; follow: it has requested the state of ``step``; finish: all steps are
committed."""

_CORRUPTIONS = ("nan", "bitflip")
STATE = ("parameter", "moment", "buffer")
"""Tensors besides gradients in which a bit can be flipped; ``_NAMED`` has the prefixes of their names
(``run.engines.state_tensors``)."""
_NAMED = {"parameter": "parameter ", "moment": "optimizer exp_avg", "buffer": "buffer "}
_AT_REST = ("gradient", "loss", *STATE)
"""Values that are corrupted after a microbatch; the others at the moment they arise: the output of a module, a reduced
bucket."""
CORRUPTIBLE_BY = {"nan": ("gradient", "loss"), "bitflip": ("gradient", "activation", "sum", *STATE)}
CORRUPTIBLE = tuple(dict.fromkeys(what for some in CORRUPTIBLE_BY.values() for what in some))
_LOOKS = ("begin", "finish")
"""Points at which the mailbox is read."""
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Breakpoint:
    """Freezes a rank at a point.

    Attributes:
        group: group of the rank.
        step: step number; None: any step.
        point: one of ``POINTS``.
        bucket: bucket at the point; None: any bucket.
        position: rank in its group.
        after: number of times that the rank passes the point in this step before.
        incarnation: number of the start of the group, from 0.
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
            raise ConfigError(f"fault point {self.point!r} is not known; choose from {', '.join(POINTS)}")


def to_env(holds: list[Breakpoint]) -> dict[str, str]:
    """Returns the environment that arms these holds in the ranks of a launch."""
    return {VARIABLE: json.dumps([asdict(hold) for hold in holds])}


@dataclass(frozen=True, kw_only=True)
class FaultCommand:
    """A fault that a rank carries out once, when it reaches ``point``.

    Attributes: fault: name in the record; "" for a hold of the environment. action: ``hold``, or one of
    ``cluster.faults.schedule.IN_PROCESS``. point: one of ``POINTS``. step: step number; None: any step. bucket: bucket
    number; None: any bucket, and for a corruption one that ``seed`` draws. duration_s: duration of ``gil``. factor:
    slowdown of ``slow``. steps: number of slow steps. what: tensor to corrupt: ``gradient`` or ``loss`` for ``nan``;
    ``gradient``, ``activation`` (an output of a module), ``sum`` (a reduced bucket), ``parameter``, ``moment`` or
    ``buffer`` for ``bitflip``. bit: bit to flip, 0 for the lowest; None: drawn. seed: seed
    of drawn values. after: number of times that the rank passes the point of this step before. probability: of a bit flip
    in each microbatch, in every step; 0: it happens once.
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
    probability: float = 0.0


class Corruptible(Protocol):
    """The part of an engine that a corruption needs. All tensors are views of those that will be reduced."""

    def local_gradients(self) -> Sequence[torch.Tensor]:
        """Returns the flat local gradient of each bucket, without other values that are reduced with it."""

    def local_losses(self) -> Sequence[torch.Tensor]:
        """Returns the sum of losses in each bucket; tensors of one element."""

    def state_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the named tensors of the model and the optimizer."""

    def modules(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Returns the named modules of the model."""


class InjectedError(RuntimeError):
    """Raised in the training thread by an order. It must look like a bug, so it is not an ``FTError``."""


# --- the mailbox, used by both sides ----------------------------------------------------------------------------------


def mailbox(run_dir: Path, group: int, position: int) -> Path:
    """Returns the file with the orders for a rank."""
    return run_dir / DIRECTORY / f"g{group}.p{position}.json"


def reached_file(run_dir: Path, group: int, position: int) -> Path:
    """Returns the file in which a rank names the order for which it freezes."""
    return run_dir / DIRECTORY / f"g{group}.p{position}.reached"


def post(run_dir: Path, group: int, position: int, process: tuple[int, int], orders: Sequence[FaultCommand]) -> None:
    """Replace the orders for a rank, in the injector's process. ``process`` is the rank's pid and :func:`start_of`.

    Raises ``OSError``.
    """
    path = mailbox(run_dir, group, position)
    shared_file.make_directory(path.parent)
    shared_file.write_json(path, {"process": list(process), "orders": [asdict(order) for order in orders]})


# --- the rank's side --------------------------------------------------------------------------------------------------


class InjectionPoints:
    """The points of one rank. Only the training thread calls its methods."""

    def __init__(self, group: int, holds: list[Breakpoint], *, position: int = 0, run_dir: Path | None = None) -> None:
        self._group, self._position, self._run_dir = group, position, run_dir
        mine = [hold for hold in holds if (hold.group, hold.position) == (group, position)]
        self._orders = [
            FaultCommand(
                fault="", action="hold", point=hold.point, step=hold.step, bucket=hold.bucket, after=hold.after
            )
            for hold in mine
        ]
        self._mailbox = None if run_dir is None else os.fspath(mailbox(run_dir, group, position))
        self._seen: tuple[int, int] | None = None
        self._looked = float("-inf")
        self._done: set[str] = set()
        self._slow: _Slow | None = None
        self._dice = random.Random(f"{group}.{position}")

    @classmethod
    def from_env(cls, group: int, position: int, incarnation: int, run_dir: Path) -> InjectionPoints:
        """The points of this start of a rank, with the holds that the launch has for it."""
        holds = [Breakpoint(**hold) for hold in json.loads(os.environ.get(VARIABLE) or "[]")]
        mine = [hold for hold in holds if hold.incarnation == incarnation]
        return cls(group, mine, position=position, run_dir=run_dir)

    def reach(self, point: str, step: int, bucket: int | None = None) -> None:
        """Called at each point. Carries out an order that matches, once.

        Raises ``InjectedError`` or ``torch.OutOfMemoryError`` when an order demands it.
        """
        if self._mailbox is not None and point in _LOOKS:
            self._poll()
        if self._slow is not None:
            self._slow = self._slow.pace(step, computes=point in ("forward", "backward"))
        for order in list(self._orders):
            here = order.point == point and order.step in (None, step) and order.bucket in (None, bucket)
            if here and order.action not in _CORRUPTIONS:
                if order.after:
                    self._orders[self._orders.index(order)] = replace(order, after=order.after - 1)
                else:
                    self._carry_out(order, step, bucket)

    def corrupts(self, step: int) -> bool:
        """Returns True when a gradient of that step will be corrupted; its bucket must not be sent before."""
        return any(_corrupts(order, step, _AT_REST) for order in self._orders)

    def corrupt(self, step: int, engine: Corruptible) -> None:
        """Called after each computed microbatch. Corrupts local gradients when an order demands it."""
        if self._slow is not None:
            self._slow = self._slow.pace(step, computes=False)
        for order in self._corruptions(step, _AT_REST):
            if order.what == "loss":
                if self._record(order, f"NaN as loss, step {step}"):
                    for tensor in (*engine.local_gradients(), *engine.local_losses()):
                        tensor.fill_(float("nan"))
            else:
                self._corrupt(step, _Change(order, _named(order, engine)))

    def corrupt_activation(self, step: int, engine: Corruptible) -> None:
        """Called before each forward pass. Makes the output of a module wrong in it when an order demands it."""
        for order in self._corruptions(step, ("activation",)):
            leaves = [(name, module) for name, module in engine.modules() if not list(module.children())]
            name, module = random.Random(order.seed).choice(leaves)
            if self._record(order, f"the output of {name}, step {step}"):
                _flip_output(order, name, module)

    def corrupt_sum(self, step: int, bucket: int, reduced: torch.Tensor) -> None:
        """Called with each reduced bucket. Flips a bit in it when an order demands it."""
        for order in self._corruptions(step, ("sum",), bucket):
            self._corrupt(step, _Change(order, [(f"the reduced bucket {bucket}", reduced)]))

    def _corruptions(self, step: int, what: Sequence[str], bucket: int | None = None) -> Iterator[FaultCommand]:
        """Yields the orders to corrupt these values now. ``bucket``: the only one that is there."""
        for order in [order for order in self._orders if _corrupts(order, step, what)]:
            if order.probability:
                if self._dice.random() < order.probability:
                    yield replace(order, seed=self._dice.randrange(2**32))
            elif (bucket is None or order.bucket in (None, bucket)) and self._still_stands(order):
                yield order

    def _corrupt(self, step: int, change: _Change) -> None:
        if self._record(change.order, f"{change}, step {step}"):
            change.make()

    def _poll(self) -> None:
        """Reads the mailbox if it has changed."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            status = os.stat(given(self._mailbox))
            seen = (status.st_ino, status.st_mtime_ns)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        posted = [order for order in self._read() if order.fault not in self._done] if seen is not None else []
        self._orders = [order for order in self._orders if not order.fault] + posted

    def _read(self) -> list[FaultCommand]:
        try:
            # Write permission for the directory does not suffice to give orders to another user's run.
            value = json.loads(shared_file.read_record(given(self._mailbox)))
            if tuple(value["process"]) != (os.getpid(), start_of(os.getpid())):
                return []
            return [FaultCommand(**order) for order in value["orders"]]
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning(f"fault orders in {self._mailbox} ignored: {error}")
            return []

    def _still_stands(self, order: FaultCommand) -> bool:
        """Returns False for an order that was withdrawn or carried out before."""
        if order.fault:
            self._poll()
            if order not in self._orders:
                return False
            self._done.add(order.fault)
        self._orders.remove(order)
        return True

    def _carry_out(self, order: FaultCommand, step: int, bucket: int | None) -> None:
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

                raise torch.OutOfMemoryError(f"injected fault {order.fault} at {where}: no device memory was requested")
            case "gil":
                hold_gil(order.duration_s)
            case "slow":
                self._slow = _Slow(step + order.steps, order.factor)

    def _freeze(self, order: FaultCommand, step: int, bucket: int | None) -> None:
        """Writes the reason, reads the mailbox a last time, then freezes: a withdrawal is seen by one of both sides."""
        if order.fault:
            value = {"fault": order.fault, "process": [os.getpid(), start_of(os.getpid())]}
            try:
                shared_file.write_json(
                    reached_file(given(self._run_dir), self._group, self._position),
                    {**value, "at": f"{describe(order.point, bucket)}, step {step}"},
                )
            except OSError:
                return  # the injector could not tell why the rank waits
        if self._still_stands(order):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _record(self, order: FaultCommand, where: str) -> bool:
        try:
            history.append(
                given(self._run_dir),
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


def _corrupts(order: FaultCommand, step: int, what: Sequence[str]) -> bool:
    return order.action in _CORRUPTIONS and order.what in what and order.step in (None, step)


def describe(point: str, bucket: int | None) -> str:
    """Return the name of a point, with the bucket where it has one."""
    return point if bucket is None else f"{point} {bucket}"


def hold_gil(duration_s: float) -> None:
    """Sleeps while it holds the GIL, as a C extension that does not release it."""

    class _Timespec(ctypes.Structure):
        _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

    whole = int(duration_s)
    # A single call: between two calls the interpreter would release the GIL. PyDLL does not.
    ctypes.PyDLL(None).nanosleep(ctypes.byref(_Timespec(whole, int((duration_s - whole) * 1e9))), None)


@dataclass(frozen=True)
class _Slow:
    """Slows computing down by ``factor`` before step ``until``, by a sleep after each part."""

    until: int
    factor: float
    since: float | None = None

    def pace(self, step: int, computes: bool) -> _Slow | None:
        """Called at the end of each part of a step. Returns None after the last slow step.

        ``computes``: the part that begins is a forward or backward pass.
        """
        if self.since is not None:
            time.sleep((time.perf_counter() - self.since) * (self.factor - 1))
        if step >= self.until:
            return None
        return _Slow(self.until, self.factor, time.perf_counter() if computes else None)


class _Change:
    """An element of one of the ``named`` flat tensors becomes NaN, or one of its bits is flipped. Raises ``InjectedError``
    when there is no tensor."""

    def __init__(self, order: FaultCommand, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        if not named:
            raise InjectedError(f"injected fault {order.fault}: the engine has no {order.what} in which to flip a bit")
        self.order, rng = order, random.Random(order.seed)
        drawn = rng.randrange(len(named))
        self._name, self._tensor = named[drawn if order.bucket is None else order.bucket % len(named)]
        self._element = rng.randrange(self._tensor.numel())
        bits = 8 * self._tensor.element_size()
        drawn = rng.randrange(bits)
        self._bit = drawn if order.bit is None else order.bit % bits

    def __str__(self) -> str:
        what = "NaN in" if self.order.action == "nan" else f"bit {self._bit} of"
        return f"{what} element {self._element} of {self._name}"

    def make(self) -> None:
        if self.order.action == "nan":
            self._tensor[self._element] = float("nan")
            return
        import torch

        byte = self._element * self._tensor.element_size() + self._bit // 8  # the lowest comes first
        self._tensor.view(torch.uint8)[byte] ^= 1 << self._bit % 8


def _named(order: FaultCommand, engine: Corruptible) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors that an order may change. Of ``data`` torch counts no writes: memory that fails gives no
    sign."""
    begins = _NAMED.get(order.what)
    if begins is None:
        return [(f"bucket {number}", gradient) for number, gradient in enumerate(engine.local_gradients())]
    return [(name, tensor.data.view(-1)) for name, tensor in engine.state_tensors() if name.startswith(begins)]


def _flip_output(order: FaultCommand, name: str, module: torch.nn.Module) -> None:
    """Flips a bit in the first tensor of the module's next output."""

    def flip(_module: object, _inputs: object, output: Any) -> None:
        handle.remove()
        first = output[0] if isinstance(output, tuple | list) else output
        _Change(order, [(f"the output of {name}", first.data.view(-1))]).make()

    handle = module.register_forward_hook(flip)
