"""The ranks of one group from the leader's side: all of them, itself included, carry out each order that it gives.

With several ranks per group, the ranks share the group's microbatches: each computes whole ones, as many at a time as
there are ranks; or they compute all of them together (``run.engines.port.JointEngine``).
"""

from __future__ import annotations

from typing import Any, TypeVar

from megatron_ft import codec
from megatron_ft.run.orders import Flush, Order
from megatron_ft.run.rank_executor import RankExecutor

Result = TypeVar("Result")


class GroupExecutor:
    """The ranks of one group; ``local``: the leader's own. ``width`` microbatches are computed at a time."""

    def __init__(self, local: RankExecutor) -> None:
        self.local, self.rank = local, local.rank
        self.width = local.rank.size
        self._deferred: list[Order[Any]] | None = None

    def carry_out(self, order: Order[Result]) -> Result:
        """Tell all other ranks, run the order at this one, and return its result. Raises ``Lost`` when a rank of the
        group is gone; for orders between groups ``Broken``, when the epoch is over."""
        self._tell(order)
        return order.run(self.local)

    def flush(self, flush: Flush) -> None:
        """Compute microbatches together. No rank receives an order during a flush: it comes after it."""
        self._tell(flush)
        self._deferred = []
        flush.run(self.local)
        deferred, self._deferred = self._deferred, None
        for order_meanwhile in deferred:
            self._tell(order_meanwhile)

    def _tell(self, order: Order[Any]) -> None:
        if self._deferred is not None:
            self._deferred.append(order)
        elif self.rank.inner is not None:
            self.rank.inner.order(type(order).__name__, **codec.encode(order))
