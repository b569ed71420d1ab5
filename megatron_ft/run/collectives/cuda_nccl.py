"""NCCL as ``run.collectives.nccl_communicator`` uses it: torch's ``ProcessGroupNCCL`` on one device.

Every operation is queued from a stream of its own, so that the computation's stream never waits for another group, and
its end is an event on that stream. The event is the only thing that is asked: a work's ``is_completed`` also says True for
one that has failed while its kernel runs, and ``wait`` with a timeout aborts.

``connect`` makes the communicator at once (``eager_connect_single_device``). Otherwise the first operation would make it in
the training thread, and each pair of ranks that exchanges messages would get another one. It is nonblocking: a thread
inside NCCL can be ended by an abort.

Requirements: torch 2.8 or newer with CUDA, and NCCL's watchdog disarmed (``run.collectives.nccl_watchdog.environment``).
Only ``tests/gpu`` runs this module.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.run.collectives.gloo_communicator import broadcast_from

_NEVER = timedelta(days=30)
"""The time limit is the communicator's own; that of the process group would let NCCL's watchdog act first."""


class _Event:
    def __init__(self, event: Any, work: Any) -> None:
        self._event, self._work = event, work  # the work keeps the tensors

    def ended(self) -> bool:
        return bool(self._event.query())


class CudaNccl:
    """One rank of an NCCL communicator.

    Args:
        device: the rank's own device.
        name: of the communicator in NCCL's records, the same at all ranks.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device, self._name = device, name
        self._group: Any = None
        self._stream: Any = None
        self._size = 0

    def connect(self, rendezvous: Any, rank: int, size: int) -> None:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.blocking = 0
        options._timeout = _NEVER
        options.group_name, options.global_ranks_in_group = self._name, list(range(size))
        self._stream, self._size = torch.cuda.Stream(self._device), size
        self._group = nccl(rendezvous, rank, size, options)
        self._group.eager_connect_single_device(self._device)

    def all_reduce(self, tensor: torch.Tensor) -> _Event:
        if tensor.dtype == torch.bfloat16:
            return self._sum_in_fp32(tensor)
        return self._queue(lambda: self._group.allreduce([tensor]))

    def _sum_in_fp32(self, tensor: torch.Tensor) -> _Event:
        """Each rank adds its share of all tensors in fp32, and all gather the rounded shares: as many bytes as a ring. NCCL
        itself would round after each addition."""
        flat = tensor.view(-1)
        share = -(-flat.numel() // self._size)

        def operations() -> Any:
            sent, received = torch.zeros(2, self._size * share, dtype=tensor.dtype, device=self._device)
            sent[: flat.numel()].copy_(flat)
            # no limit: it does not block: a stream waits
            self._group.alltoall_base(received, sent, [], []).wait()
            mine = received.view(self._size, share).sum(0, dtype=torch.float32).to(tensor.dtype)
            gathering = self._group._allgather_base(sent, mine)
            # no limit: it does not block: a stream waits
            gathering.wait()
            flat.copy_(sent[: flat.numel()])
            return gathering

        return self._queue(operations)

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Event:
        return self._queue(lambda: self._group.broadcast([tensor], broadcast_from(root)))

    def send(self, tensor: torch.Tensor, to: int) -> _Event:
        return self._queue(lambda: self._group.send([tensor], to, 0))

    def receive(self, tensor: torch.Tensor, source: int) -> _Event:
        return self._queue(lambda: self._group.recv([tensor], source, 0))

    def error(self) -> str:
        name = self._group.get_error().name
        return "" if name == "SUCCESS" else f"NCCL's watchdog says {name}"

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _queue(self, operation: Callable[[], Any]) -> _Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work = operation()
            # no limit: it does not block: the device's stream waits
            work.wait()  # makes the stream wait, not this thread
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Event(event, work)
