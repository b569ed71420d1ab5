"""Sums on two levels: inside each host, then between the hosts.

Groups that share a host also share its network, so what a host sends should not grow with their number. A sum takes these
steps, each on a communicator of its own (``collectives.chained_operations``):

1. inside each host, the members add to the leader, the lowest of them;
2. the leaders sum over the hosts;
3. each leader hands the result to the others on its host.

**bf16** tensors are added in fp32 and travel between hosts as bf16: in step 2 each leader receives its share of all other
hosts' sums (an all-to-all), adds them in fp32, and all leaders gather the rounded shares. So an element of the sum is wrong
by at most 2^-8 of its host's sum and 2^-8 of the total, whatever the number of hosts and groups, and 2^-8 of what each group
has rounded before. A ring in bf16 rounds after each addition. Without shared hosts steps 1 and 3 are left out.

Broadcasts and messages go through the communicator of all members.

Failures it assumes: those of ``collectives.base``. When a step fails at one member, the others of that step fail or wait; an
abort ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from megatron_ft.collectives.base import ABORTED, Communicator, Work
from megatron_ft.collectives.chained_operations import Chain, ChainingCommunicator
from megatron_ft.collectives.gloo_communicator import GlooCommunicator

PIECE = 2**22
"""Bytes of a piece: while one is summed between hosts, the next is summed inside them."""
_UP, _ACROSS, _BACK, _DOWN = range(4)


class TwoLevelCommunicator(ChainingCommunicator):
    """``whole``, with sums on two levels. Their tensors are in the host's memory: a thread of its own works on them, which
    knows nothing of a device's streams.

    Args:
        whole: a communicator of all members, which this one owns from now on.
        hosts: the members of each host; every member is on one.
        make: returns a communicator of some members, this one among them, under a name of their own. It waits for them.
        rounded: whether bf16 travels between hosts as bf16. False: as fp32, and leaders are connected once only.
    """

    LAST_STEP = _DOWN
    FAILED = "a sum failed"

    def __init__(
        self,
        whole: Communicator,
        hosts: Sequence[Sequence[int]],
        make: Callable[[str, Sequence[int]], GlooCommunicator],
        *,
        rounded: bool,
    ) -> None:
        super().__init__(whole)
        me = whole.members[whole._place]
        self._host = next(host for host in hosts if me in host)
        self._leaders = sorted(min(host) for host in hosts)
        self._leads = me in self._leaders
        self._make, self._rounded = make, rounded
        self._parts: dict[int, GlooCommunicator] = {}

    def connect(self) -> None:
        # no limit: it is the inner communicator's
        super().connect()
        if len(self._host) > 1:
            self._join(_UP, self._host)
            self._join(_DOWN, self._host)
        if self._leads and len(self._leaders) > 1:
            self._join(_ACROSS, self._leaders)
            if self._rounded:
                self._join(_BACK, self._leaders)

    def _join(self, step: int, members: Sequence[int]) -> None:
        part = self._parts[step] = self._make(f"{step}/{min(members)}", members)
        if self._over.aborted:  # before it was among the parts
            part.close()
            raise RuntimeError(ABORTED)

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        flat = tensor.detach().view(-1)
        return self._chain(flat.split(max(1, PIECE // flat.element_size())), self._sum)

    def _sum(self, chain: Chain, piece: torch.Tensor) -> Generator[None]:
        parts, leader = self._parts, min(self._host)
        total = piece.float() if piece.dtype == torch.bfloat16 else piece
        chain.kept.append(total)
        if _UP in parts:
            yield from chain.step(_UP, lambda: parts[_UP].reduce(total, leader))
        if _BACK in parts and total is not piece:
            yield from self._sum_rounded(chain, total)
        elif _ACROSS in parts:
            yield from chain.step(_ACROSS, lambda: parts[_ACROSS].all_reduce(total))
        if total is not piece:
            piece.copy_(total)
        if _DOWN in parts:
            yield from chain.step(_DOWN, lambda: parts[_DOWN].broadcast(piece, leader))

    def _sum_rounded(self, chain: Chain, total: torch.Tensor) -> Generator[None]:
        hosts = len(self._leaders)
        share = -(-total.numel() // hosts)
        sent, received = torch.zeros(2, hosts * share, dtype=torch.bfloat16)
        sent[: total.numel()].copy_(total)
        chain.kept += [sent, received]
        yield from chain.step(_ACROSS, lambda: self._parts[_ACROSS].exchange(received, sent))
        mine = received.view(hosts, share).sum(0, dtype=torch.float32).to(torch.bfloat16)
        chain.kept.append(mine)
        yield from chain.step(_BACK, lambda: self._parts[_BACK].gather(sent, mine))
        total.copy_(sent[: total.numel()])

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._inner.broadcast(tensor, self.members[root])

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        return self._inner.send(tensor, self.members[to], tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        return self._inner.receive(tensor, self.members[source], tag)

    def leave(self) -> None:
        super().leave()
        self._inner.leave()

    def _cut(self) -> None:
        super()._cut()
        for part in list(self._parts.values()):
            part.abort()

    def _release(self) -> Any:
        for part in list(self._parts.values()):
            part.close()
        return super()._release()
