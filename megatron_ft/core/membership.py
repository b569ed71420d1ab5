"""Membership: from the reports of an ending epoch to the next view (architecture.md, step protocol 2-4).

The view that wins the compare-and-set holds everything the survivors need, so what follows is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ft.types import Bucket, GroupId, Report, View


def first_view(groups: int) -> View:
    """Epoch 0: everybody is live, and takes the initial model of group 0, whatever its own script initialised."""
    live = tuple(range(groups))
    return View(epoch=0, live=live, reason="the run starts", step=0, source=0, behind=live[1:])


def next_view(
    view: View,
    reports: Mapping[GroupId, Report],
    dead: Mapping[GroupId, str],
    silent: Mapping[GroupId, str],
    reason: str,
) -> View | None:
    """The view to propose, or None while a report is still awaited.

    ``dead`` have a verdict against them; ``silent`` are given up on because their report did not come in time. A group
    that is neither must have reported. None as well when nobody would be left.
    """
    gone = {group: why for group, why in {**silent, **dead}.items() if group in view.live}
    live = tuple(group for group in view.live if group not in gone)
    if not live or any(group not in reports for group in live):
        return None
    told = {group: reports[group] for group in live}
    step = max(report.step for report in told.values())
    source, behind = _state_transfer(told, step)
    final, missing = _bucket_transfer({group: r for group, r in told.items() if r.step == step and group not in behind})
    return View(
        epoch=view.epoch + 1,
        live=live,
        reason=reason,
        step=step,
        lost=gone,
        source=source,
        behind=behind,
        final=final,
        missing=missing,
    )


def _state_transfer(told: Mapping[GroupId, Report], step: int) -> tuple[GroupId | None, tuple[GroupId, ...]]:
    """Who has the state that ``step`` starts from, and who needs it.

    A group that has passed the gate of step s works on s+1: s is decided, and the others catch up by one step instead
    of reducing again. When nobody is synced yet (the run has just started) the lowest group's initial model is it.
    """
    lowest, highest = min(report.step for report in told.values()), step
    assert highest - lowest <= 1, f"live groups are {highest - lowest} steps apart: {told}"
    synced = [group for group, report in sorted(told.items()) if report.synced and report.step == step]
    source = synced[0] if synced else min(told)
    behind = tuple(
        group
        for group, report in sorted(told.items())
        if group != source and (report.step < step or not report.synced)
    )
    return (source, behind) if behind else (None, ())


def _bucket_transfer(
    told: Mapping[GroupId, Report],
) -> tuple[dict[Bucket, GroupId], dict[Bucket, tuple[GroupId, ...]]]:
    """A bucket that any survivor saw finished is final; the lowest that has it hands it to those that do not."""
    owners: dict[Bucket, GroupId] = {}
    for group in sorted(told):
        for bucket in told[group].have:
            owners.setdefault(bucket, group)
    missing = {
        bucket: tuple(group for group in sorted(told) if bucket not in told[group].have) for bucket in sorted(owners)
    }
    return dict(sorted(owners.items())), {bucket: groups for bucket, groups in missing.items() if groups}
