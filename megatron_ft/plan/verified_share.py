"""How many microbatches to verify (``verify.microbatches_per_step``): what it costs, and how soon a bad host is found.

A bad group computes a share ``p`` of its microbatches wrongly. In a step of N groups with G microbatches each, k
microbatches are computed by two groups (``core.exactness.verification``): each group contributes k/N of them, and
verifies as many. So the bad group takes part in 2k/N checks of a step, and each finds it with probability p.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from megatron_ft.plan.cluster import Cluster
from megatron_ft.utils.durations import duration
from megatron_ft.utils.tables import Column, FittedTable


@dataclass(frozen=True)
class Verified:
    """The effect of verifying ``per_step`` microbatches of a step.

    Attributes:
        per_step: k.
        covered: probability that one wrong microbatch is found in its step: k / (N G).
        found_per_step: probability that the bad group is found in a step.
        steps: expected number of steps until then; inf if never.
        wrong_updates: expected number of updates with a wrong gradient before it is found.
        step_factor: time of a step over its time without verification, where no group waits for others anyway.
    """

    per_step: int
    covered: float
    found_per_step: float
    steps: float
    wrong_updates: float
    step_factor: float


def effect(groups: int, microbatches: int, per_step: int, share: float, compute_share: float = 1.0) -> Verified:
    """Return the effect for N ``groups`` of G ``microbatches``.

    Args:
        groups: number of groups, >= 2.
        microbatches: of a group in a step, >= 1.
        per_step: number of verified microbatches, 0 to N G.
        share: p, 0 to 1.
        compute_share: part of a step in which microbatches are computed.
    """

    def all_right(count: float) -> float:
        """Return the probability that none of ``count`` microbatches is wrong; a fraction is the share of the steps."""
        return float((1 - share) ** int(count) * (1 - count % 1 * share))

    verifies = per_step / groups  # as often as its own microbatches are verified
    unfound = all_right(2 * verifies)
    unseen = unfound - all_right(microbatches + verifies)  # a contributed microbatch is wrong, and none that is checked
    found = 1 - unfound
    steps = 1 / found if found else inf
    wrong = unseen / found if found else inf
    return Verified(
        per_step=per_step,
        covered=per_step / (groups * microbatches),
        found_per_step=found,
        steps=steps,
        wrong_updates=wrong,
        step_factor=1 + compute_share * ceil(per_step / groups) / microbatches,
    )


def choices(cluster: Cluster, share: float) -> list[Verified]:
    """Return the effect of some sensible numbers, the smallest first; empty for a single group."""
    groups, most = cluster.groups, cluster.groups * cluster.microbatches
    if groups < 2:
        return []
    numbers = sorted({1, max(1, groups // 8), groups, most} | {min(2 * groups, most)})
    compute = cluster.compute_s / cluster.step_s
    return [effect(groups, cluster.microbatches, number, share, compute) for number in numbers]


def table(cluster: Cluster, share: float) -> FittedTable:
    """Return the choices as a table."""
    names = (
        "microbatches\nper step",
        "one wrong is\nfound at once",
        "host is\nfound after",
        "wrong updates\nbefore",
        "step\ntime",
    )
    rows = []
    for one in choices(cluster, share):
        time = "never" if one.steps == inf else duration(one.steps * cluster.step_s * one.step_factor)
        wrong = "-" if one.wrong_updates == inf else f"{one.wrong_updates:.3g}"
        rows.append((str(one.per_step), f"{one.covered:.2%}", time, wrong, f"{one.step_factor:.3f}"))
    return FittedTable(
        f"Verification: a host that computes {share:g} of its microbatches wrongly",
        [Column(name, right=True) for name in names],
        rows,
        "a single group has no other that could verify",
        "microbatches_per_step: verify. A wrong microbatch is replaced in its step if it is verified.",
    )
