"""One group's process in the checks of communicators: ``python -m megatron_ft.cluster.qualify.member_process``.

It carries out orders of its host (``cluster.doctor.host_orders``), over a socket that it inherits. A failed operation is an
answer, too (``failed``), never the end of the process. Failures it assumes: its host's process ends (it ends with it), and
it may be stopped or killed at any moment.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft import codec
from megatron_ft.cluster.doctor.host_orders import Part, serve
from megatron_ft.cluster.doctor.meeting import Channel
from megatron_ft.run.collectives import base, communicator_choice, nccl_watchdog, state_transfer
from megatron_ft.run.collectives.base import Broken, Communicator, Work
from megatron_ft.run.collectives.communicator_choice import Choice, Maker, Offer
from megatron_ft.types import given
from megatron_ft.utils import lifeline

_TAG = 7
_STORE_S = 60.0
_OPERATION_S = 120.0
"""Time limit of an operation by itself. The checks end one that waits, long before."""
Answer = dict[str, Any]


class Member(Part):
    """The process's side of one communicator after the other."""

    failures = (Broken, RuntimeError, OSError)  # also of torch, CUDA and the store

    def __init__(self) -> None:
        self._me, self._address, self._device = 0, "", torch.device("cpu")
        self._store: Any = None
        self._made: Communicator | None = None
        self._pending: _Pending | None = None

    @property
    def _outer(self) -> Communicator:
        return given(self._made)

    def enter(self, me: int, store: list[Any], address: str, device: str) -> Answer:
        """Connect to the torch store at which the communicators meet, and answer with what this process offers."""
        self._me, self._address, self._device = me, address, torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        host, port = store
        self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        offer = Offer.of(communicator_choice.AUTO, self._device, address)
        said = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}
        return {"offer": codec.encode(offer), "watchdog": said}

    def connect(self, kind: str, name: str, epoch: int, members: list[int], hosts: list[int]) -> Answer:
        """Build a communicator in place of the one before. ``name``: no other one of the whole qualification has it;
        ``hosts``: of the members."""
        self.close()
        maker = Maker(self._me, members, epoch, _OPERATION_S, self._address, self._device)
        began = time.monotonic()
        in_memory = self._device.type == "cpu"  # as Offer.of says it of a run
        choice = Choice.of(kind, dict(zip(members, hosts, strict=True)) if in_memory else {})
        self._made = maker.make(choice, name, lambda name: dist.PrefixStore(name, self._store))
        # no limit: host 0 waits for the answer for a limited time, and has the process replaced
        self._made.connect()
        return {"seconds": time.monotonic() - began}

    def all_reduce(self, bytes: int, repeats: int) -> Answer:
        """Sum tensors whose sum is known, and time it without looking at the sums."""
        own = self._numbers(bytes // 4)
        count = len(self._outer.members)
        expected = torch.arange(own.numel(), device=self._device).remainder(251) * count + sum(self._outer.members)
        # no limit: host 0 waits for the answer for a limited time, and has the process replaced
        self._outer.all_reduce(own).wait()
        wrong = int((own != expected).sum())
        # no limit: host 0 waits for the answer for a limited time, and has the process replaced
        seconds = [self._timed(lambda: self._outer.all_reduce(own).wait()) for _ in range(repeats)]
        return {"wrong": wrong, "of": own.numel(), "seconds": statistics.median(seconds)}

    def messages(self, bytes: int) -> Answer:
        """Broadcast the lowest member's tensor; then send one's own to the next member, and receive the former one's."""
        outer, count = self._outer, bytes // 4
        place, first = outer.members.index(self._me), outer.members[0]
        got = self._numbers(count)
        began = time.monotonic()
        # no limit: host 0 waits for the answer for a limited time, and has the process replaced
        outer.broadcast(got, first).wait()
        self._settle()
        seconds = time.monotonic() - began
        wrong = int((got != self._numbers(count, first)).sum())
        after, before = outer.members[(place + 1) % len(outer.members)], outer.members[place - 1]
        # In turns: NCCL matches messages by their order.
        own, other = self._numbers(count), torch.empty(count, device=self._device)
        turns: list[Callable[[], Work]] = [
            lambda: outer.send(own, after, _TAG),
            lambda: outer.receive(other, before, _TAG),
        ]
        for turn in turns if place % 2 == 0 else reversed(turns):
            # no limit: host 0 waits for the answer for a limited time, and has the process replaced
            turn().wait()
        self._settle()
        wrong += int((other != self._numbers(count, before)).sum())
        return {"wrong": wrong, "of": 2 * count, "seconds": seconds}

    def state(self, source: int, to: int, bytes: int) -> Answer:
        """Hand a model's and an optimizer's state of that size from one member to another."""
        if self._me not in (source, to):
            return {}
        numbers = self._numbers(bytes // 8, source)
        state = {"model": {"weight": numbers}, "moments": [numbers], "step": source}
        began = time.monotonic()
        if self._me == source:
            state_transfer.send_state(self._outer, state, to)
            return {"seconds": time.monotonic() - began}
        got = state_transfer.receive_state(self._outer, source)
        seconds = time.monotonic() - began
        parts = (got["model"]["weight"], got["moments"][0])
        same = got["step"] == source and all(torch.equal(part.to(self._device), numbers) for part in parts)
        return {"seconds": seconds, "wrong": 0 if same else 1, "of": 1}

    def overlap(self, width: int, layers: int, steps: int) -> Answer:
        """Time a backward pass alone, with the reduction after it, and with the reduction of each layer within it."""
        torch.manual_seed(0)
        linear = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        model = torch.nn.Sequential(*(part for layer in linear for part in (layer, torch.nn.ReLU()))).to(self._device)
        weights: list[torch.Tensor] = [layer.weight for layer in linear]
        batch = torch.randn(width, width, device=self._device)
        started: list[Work] = []
        inside = False

        def begin(weight: torch.Tensor) -> None:
            if inside:
                started.append(self._outer.all_reduce(given(weight.grad)))

        for weight in weights:
            weight.register_post_accumulate_grad_hook(begin)

        def step(reduces: bool) -> None:
            model.zero_grad()
            model(batch).square().mean().backward()
            if reduces and not inside:
                started.extend(self._outer.all_reduce(given(weight.grad)) for weight in reversed(weights))
            for work in started:
                # no limit: host 0 waits for the answer for a limited time, and has the process replaced
                work.wait()
            started.clear()

        seconds: dict[str, list[float]] = {"alone": [], "after": [], "overlapped": []}
        sums: dict[str, torch.Tensor] = {}
        for number in range(steps + 1):
            for way, times in seconds.items():
                inside = way == "overlapped"
                # no limit: host 0 waits for the answer for a limited time, and has the process replaced
                self._outer.all_reduce(torch.zeros(1, device=self._device)).wait()  # all members begin together
                took = self._timed(partial(step, way != "alone"))
                if number:  # the first one warms up
                    times.append(took)
                sums[way] = given(weights[0].grad).clone()
        count = len(self._outer.members)
        same = torch.allclose(sums["after"], sums["alone"] * count, rtol=1e-4, atol=1e-6)
        same = same and torch.allclose(sums["overlapped"], sums["after"], rtol=1e-4, atol=1e-6)
        size = sum(weight.numel() * 4 for weight in weights)
        return {
            **{way: statistics.median(times) for way, times in seconds.items()},
            "wrong": int(not same),
            "bytes": size,
        }

    # --- faults -------------------------------------------------------------------------------------------------------

    def begin(self, bytes: int) -> Answer:
        """Start an all-reduce and wait for it in a thread: the others do not all take part."""
        self._pending = _Pending(self._outer.all_reduce(self._numbers(bytes // 4)))
        return {}

    def mark(self) -> Answer:
        """Remember this moment as the fault's: it is a little before."""
        given(self._pending).fault = time.monotonic()
        return {}

    def ended(self, limit_s: float) -> Answer:
        """Say whether the wait has ended, at most ``limit_s`` from now, and how."""
        return given(self._pending).look(limit_s)

    def abort(self, limit_s: float) -> Answer:
        """Abort, as the news of a loss do it in a run; say when the wait has ended."""
        given(self._pending).news = began = time.monotonic()
        self._outer.abort()
        return {"returned_s": time.monotonic() - began, **given(self._pending).look(limit_s)}

    def close(self) -> Answer:
        """Close the communicator. ``stuck``: why this process cannot use its device any more, or ""."""
        made, self._made = self._made, None
        began = time.monotonic()
        if made is not None:
            made.close()
            base.sweep()
        return {"seconds": time.monotonic() - began, "stuck": base.stuck()}

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _numbers(self, count: int, member: int | None = None) -> torch.Tensor:
        """Return numbers that fp32 sums without rounding."""
        number = self._me if member is None else member
        return torch.arange(count, device=self._device).remainder(251).float() + number

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _timed(self, work: Callable[[], None]) -> float:
        self._settle()
        began = time.monotonic()
        work()
        self._settle()
        return time.monotonic() - began


class _Pending:
    """A wait in a thread of its own. ``fault``, ``news``: moments before the fault and before the abort."""

    def __init__(self, work: Work) -> None:
        self.fault = self.news = 0.0
        self._work, self._error, self._over = work, "", 0.0
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            # no limit: what the check is about: an abort ends it
            self._work.wait()
        except Broken as error:
            self._error = error.in_full
        self._over = time.monotonic()

    def look(self, limit_s: float) -> Answer:
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return {"over": False}
        since = {"since_fault_s": self._over - self.fault, "since_news_s": self._over - self.news}
        return {"over": True, "error": self._error, **since}


def main() -> None:
    """Carry out orders until the connection to this process's host ends."""
    lifeline.end_with(int(sys.argv[1]))
    os.environ.update(nccl_watchdog.environment(os.environ))
    torch.set_num_threads(1)
    orders = socket.socket(fileno=int(sys.argv[2]))
    orders.set_inheritable(False)
    serve(Channel(orders), Member())
    os._exit(0)  # a pending operation would keep the interpreter


if __name__ == "__main__":
    main()
