"""Verification: some microbatches are computed by two groups, and the digests of their gradients are compared.

With the same kernels a healthy group computes the same bits as any other. The digests travel with bucket 0, so before
the update every group sees all of them and comes to the same verdict. Two digests of a microbatch that differ name no
culprit: the step is discarded, and in the next attempt a third group computes it, too. Then the group that the others
contradict is guilty, and so is a group that contradicts its own digest of the attempt before: it leaves, and the step
is computed again without it. The first step of a run has one microbatch that all groups compute, which names a group on
other hardware before it has contributed to an update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_ft.core.detection import state_divergence
from megatron_ft.types import GroupId, Microbatch, Plan

SLACK = "slack"
"""Verify what the plan's standby groups compute anyway."""
_MOST = 4
"""Largest number of a group's digests in a step of a run that verifies with slack."""


@dataclass(frozen=True)
class Check:
    """A microbatch that several groups compute; the first contributes it according to the plan."""

    microbatch: Microbatch
    groups: tuple[GroupId, ...]


Digests = Mapping[GroupId, Sequence[int]]
"""Each group's digests, in the order of the checks that it takes part in; 0: none."""


def slots(per_step: int | str, groups: int) -> int:
    """Return the number of digests that each group can send in a step. ``groups``: at the start of the run. It is enough
    for a third opinion on everything while half of them are left; with fewer some checks are left out."""
    if per_step == SLACK:
        return _MOST
    return 6 * -(-int(per_step) // groups) + 1 if per_step else 0


def checks(
    plan: Plan,
    alive: Collection[GroupId],
    attempt: int,
    per_step: int | str,
    room: int,
    everyone: bool = False,
) -> tuple[Check, ...]:
    """Return the checks of a step's attempt.

    Args:
        plan: the step's plan as it was made for the groups that began it, without later losses.
        alive: the groups of these that are still members. A check that a lost group takes part in is left out.
        attempt: number of times that the step was discarded. From 1 on a third group takes part in each check.
        per_step: number of microbatches, or ``SLACK``.
        room: see :func:`slots`.
        everyone: True in the first step of a run: all groups compute the first microbatch.
    """
    live = sorted(group for group, share in plan.assignment.items() if share)
    if len(live) < 2 or not room:
        return ()
    if per_step == SLACK:
        found = [
            (owner, microbatch, [group])
            for group in sorted(plan.standby)
            for part in plan.standby[group]
            for microbatch in part
            for owner in live
            if owner != group and microbatch in plan.of(owner)
        ]
    else:
        found = [_drawn(plan, live, plan.step * int(per_step) + number) for number in range(int(per_step))]
    listed, used = list[Check](), dict.fromkeys(live, 0)
    if everyone:
        owner = live[0]
        found.insert(0, (owner, plan.of(owner)[0], [group for group in live if group != owner]))
    for owner, microbatch, others in found:
        if everyone and microbatch == plan.of(live[0])[0]:
            others = [group for group in others if group in alive]
        if not {owner, *others} <= set(alive):
            continue
        if attempt and len(others) == 1:
            after = live.index(others[0]) if others[0] in live else 0
            thirds = (group for group in (*live[after:], *live) if group not in (owner, *others) and group in alive)
            others = [*others, *islice(thirds, 1)]
        groups = (owner, *others)
        if all(used.get(group, room) < room for group in groups) and all(c.microbatch != microbatch for c in listed):
            listed.append(Check(microbatch, groups))
            for group in groups:
                used[group] += 1
    return tuple(listed)


def _drawn(plan: Plan, live: Sequence[GroupId], number: int) -> tuple[GroupId, Microbatch, list[GroupId]]:
    """Return the check with that number. As many in a row as a step has microbatches are of different ones, and in the
    course of a run every pair of groups has its turn with every place in a group's share."""
    turn, at = divmod(number, len(live))
    share = plan.of(live[at])
    others, place = divmod(turn, len(share))
    return live[at], share[place], [live[(at + 1 + others % (len(live) - 1)) % len(live)]]


def mine(found: Sequence[Check], group: GroupId) -> tuple[Microbatch, ...]:
    """Return the microbatches whose digests that group sends, in their order."""
    return tuple(check.microbatch for check in found if group in check.groups)


def by_microbatch(found: Sequence[Check], now: Digests) -> dict[str, dict[str, int]]:
    """Return the digests that were sent, microbatch -> group -> digest, for the record."""
    sent = zip(found, _of_checks(found, now), strict=True)
    return {
        str(check.microbatch): {str(group): digest for group, digest in said.items()} for check, said in sent if said
    }


def _of_checks(found: Sequence[Check], sent: Digests) -> list[dict[GroupId, int]]:
    """Return for each check the digests that its groups have sent."""
    places = dict.fromkeys((group for check in found for group in check.groups), 0)
    listed = []
    for check in found:
        said = {}
        for group in check.groups:
            digests, place = sent.get(group, ()), places[group]
            places[group] += 1
            if place < len(digests) and digests[place]:
                said[group] = digests[place]
        listed.append(said)
    return listed


@dataclass(frozen=True)
class Verdict:
    """The conclusion from the digests of a step.

    Attributes:
        guilty: group -> the microbatch whose gradient it computed wrongly.
        doubtful: microbatches whose digests differ, and do not say who is wrong: the next attempt does.
        tied: a microbatch about which no majority can be had, with the groups of each digest; None: there is none.
    """

    guilty: Mapping[GroupId, Microbatch]
    doubtful: tuple[Microbatch, ...] = ()
    tied: tuple[Microbatch, tuple[tuple[GroupId, ...], ...]] | None = None


def verdict(found: Sequence[Check], now: Digests, before: Digests) -> Verdict:
    """Return the verdict on a step. ``before``: the digests that each group sent in the attempt before."""
    guilty: dict[GroupId, Microbatch] = {}
    doubtful: list[Microbatch] = []
    tied = None
    for check, said, sent in zip(found, _of_checks(found, now), _of_checks(found, before), strict=True):
        earlier = {group: sent[group] for group in said if group in sent}
        comparison = state_divergence.compare(said)
        unlike = {group for group, digest in earlier.items() if said[group] != digest}
        if comparison.tied and not earlier:
            doubtful.append(check.microbatch)
        elif comparison.tied and (not unlike or unlike == said.keys()):
            tied = tied or (check.microbatch, comparison.tied)
        elif comparison.tied:
            guilty |= dict.fromkeys(sorted(unlike), check.microbatch)
        else:
            guilty |= dict.fromkeys(sorted({*comparison.minority, *unlike}), check.microbatch)
    return Verdict(guilty, tuple(doubtful), tied)
