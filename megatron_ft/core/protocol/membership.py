"""Membership: from the reports of an ending epoch to the next view (architecture.md, step protocol 2-4).

The view that wins the compare-and-set holds everything the survivors need, so what follows is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ft.core.protocol import Asked
from megatron_ft.types import Begun, Bucket, GroupId, Report, View


def first_view(groups: int, step: int = 0) -> View:
    """Epoch 0: everybody is live, and takes the initial model of group 0, whatever its own script initialised.

    A run that goes on from the checkpoint of ``step``: each group reads it for itself, so none of them has to live for the
    others to have it.
    """
    live = tuple(range(groups))
    if step:
        return View(0, live, f"the run goes on from the checkpoint of step {step}", step=step, begun=Begun(live))
    return View(
        epoch=0, live=live, reason="the run starts", step=0, source=0, behind=live[1:], begun=Begun(live)
    )


def next_view(
    view: View,
    reports: Mapping[GroupId, Report],
    dead: Mapping[GroupId, str],
    silent: Mapping[GroupId, str],
    reason: str,
    asking: Mapping[GroupId, Asked] | None = None,
) -> View | None:
    """The view to propose, or None while a report is still awaited; its ``begun`` is left to the caller.

    ``dead`` have a verdict against them; ``silent`` are given up on because their report did not come in time. A group
    that is neither must have reported. ``asking`` are groups that ask for a seat; :func:`_entering` says who gets one.
    """
    gone = {group: why for group, why in {**silent, **dead}.items() if group in view.live}
    live = tuple(group for group in view.live if group not in gone)
    if any(group not in reports for group in live):
        return None
    if not live:
        return View(view.epoch + 1, (), "every group is taken for dead (wipe-out)", lost=gone)
    told = {group: reports[group] for group in live}
    # Who has just entered and has no state yet has no say in which step is decided.
    step = max((report.step for report in told.values() if report.synced), default=None)
    if step is None and not any(view.incarnations.get(group, 0) == 0 for group in live):
        return _wipe_out(view, live, gone)
    step = step or 0  # a group of the first start that is without state: so nobody can have committed anything
    source, behind = _state_transfer(view, told, step)
    holders = {group: r for group, r in told.items() if r.step == step and group not in behind}
    final, missing = _bucket_transfer(holders, behind)
    together = not behind and not final and all(r.step == step for r in told.values() if r.synced)
    joined = _entering(view, live, asking or {}) if together else {}
    return View(
        epoch=view.epoch + 1,
        live=tuple(sorted((*live, *joined))),
        reason=reason,
        step=step,
        lost=gone,
        joined=tuple(joined),
        source=source,
        behind=behind,
        final=final,
        missing=missing,
        incarnations={**view.incarnations, **joined},
        reports=tuple(report for _, report in sorted(told.items())),
    )


def _wipe_out(view: View, live: tuple[GroupId, ...], gone: Mapping[GroupId, str]) -> View:
    """Every group that had the model is lost before it could hand it to those that had just entered."""
    why = "no live group has the model state any more (wipe-out); start again from a checkpoint"
    return View(view.epoch + 1, (), why, lost={**gone, **dict.fromkeys(live, why)})


def admissible(view: View, asked: Asked) -> bool:
    """Whether who asks could enter beside the members of ``view``: all its donors are members, and it is none.

    What its donors have committed is then what everybody has committed: they cannot have been left out with a version of
    a step that the others made again.
    """
    seated = all(view.seats(*donor) for donor in asked.donors)
    return bool(asked.donors) and seated and asked.group not in view.live


def _entering(view: View, live: tuple[GroupId, ...], asking: Mapping[GroupId, Asked]) -> dict[GroupId, int]:
    """Who of those that ask gets a seat beside ``live``, with the incarnation; only where all of these hold the same state,
    and no bucket of the step is final: who enters has neither, and is given nothing on the way. Who can commit the step
    before by itself has not done so: if all that have are lost, the step goes back to that one.
    """
    left = replace(view, live=live)
    return {group: asked.incarnation for group, asked in sorted(asking.items()) if admissible(left, asked)}


def follows(view: View, report: Report) -> bool:
    """Whether that member has entered without the state, and is getting it by itself."""
    return not report.synced and view.incarnations.get(report.group, 0) > 0


def _state_transfer(
    view: View, told: Mapping[GroupId, Report], step: int
) -> tuple[GroupId | None, tuple[GroupId, ...]]:
    """Who has the state that ``step`` starts from, and who needs it.

    A group that has passed the gate of step s works on s+1: s is decided, and the others catch up by one step instead
    of reducing again; unless they hold every bucket of s, then they only have to commit it. When nobody is synced yet
    (the run has just started) the lowest group's initial model is the state. Who follows needs nobody's help.
    """
    lowest = min((report.step for report in told.values() if report.synced), default=step)
    assert step - lowest <= 1, f"live groups are {step - lowest} steps apart: {told}"
    synced = [group for group, report in sorted(told.items()) if report.synced and report.step == step]
    source = synced[0] if synced else min(group for group, report in told.items() if not follows(view, report))
    behind = tuple(
        group
        for group, report in sorted(told.items())
        if group != source
        and not (report.synced and (report.step == step or report.complete))
        and not follows(view, report)
    )
    return (source, behind) if behind else (None, ())


def _bucket_transfer(
    holders: Mapping[GroupId, Report], behind: tuple[GroupId, ...]
) -> tuple[dict[Bucket, GroupId], dict[Bucket, tuple[GroupId, ...]]]:
    """A bucket that any survivor saw finished is final; the lowest that has it hands it to those that do not."""
    owners: dict[Bucket, GroupId] = {}
    for group in sorted(holders):
        for bucket in holders[group].have:
            owners.setdefault(bucket, group)
    missing = {
        bucket: tuple(sorted((*(group for group in holders if bucket not in holders[group].have), *behind)))
        for bucket in sorted(owners)
    }
    return dict(sorted(owners.items())), {bucket: groups for bucket, groups in missing.items() if groups}
