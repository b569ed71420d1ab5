"""The microbatches that an interrupted step takes over, as the ``recovery`` lines of the run record count them.

A step may be interrupted several times; each line counts what is new since the line before. The worker that writes a line
and the replay that decides it again both count here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.core.protocol.state import GroupState
from megatron_ft.core.scheduling import assignment
from megatron_ft.types import Microbatch


@dataclass(frozen=True)
class TakenOver:
    """The microbatches of a step that its recovery lines have counted so far.

    A microbatch may be in both: it was promoted first, and computed anew once the group that stood by was lost, too.

    Attributes:
        patched: microbatches that a group computes anew.
        promoted: microbatches that groups contribute because they stood by for a lost one.
    """

    patched: frozenset[Microbatch] = frozenset()
    promoted: frozenset[Microbatch] = frozenset()

    def after(self, state: GroupState) -> TakenOver:
        """Return what is counted once the line for ``state``, in which the step goes on, is there."""
        # With every bucket final nothing had to be taken over, whatever the plan would have been.
        if not state.unfinished:
            return self
        return TakenOver(self.patched | state.plan.patched, self.promoted | state.plan.standing_in)

    def line(self, state: GroupState) -> dict[str, Any]:
        """Return the fields of the recovery line for ``state`` that follow from the protocol."""
        counted = self.after(state)
        new = counted.patched - self.patched
        taken = {group: new.intersection(own) for group, own in state.plan.assignment.items()}
        return {
            "step": state.step,
            "epoch": state.view.epoch,
            "patched": len(new),
            "promoted": len(counted.promoted - self.promoted),
            "patched_by": {str(group): len(share) for group, share in taken.items() if share},
            "unhosted": sum(
                len(assignment.fetched(share, group, state.job.placement)) for group, share in taken.items()
            ),
            "buckets_kept": len(state.final),
            "buckets_redone": len(state.unfinished),
            "state_from": state.view.source,
            "plan": dict(state.plan.facts),
        }
