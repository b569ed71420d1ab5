"""Membership: compute the next view from the reports of an ending epoch (architecture.md, step protocol 2-4).

The view that wins the compare-and-set holds everything the survivors need, so the next state is a pure function of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ft.core.protocol.messages import JoinRequested
from megatron_ft.types import Bucket, GroupId, PlanOrigin, Report, View

_CAUSES = 3
"""The number of causes in a view's reason; its ``lost`` has the cause of every group."""


def first_view(groups: int, step: int = 0) -> View:
    """Return the view of epoch 0: all groups are live, and take the initial model of group 0 in place of their own.

    If the run goes on from the checkpoint of ``step``, each group reads it by itself, and no group is a source.
    """
    live = tuple(range(groups))
    if step:
        return View(
            0, live, f"the run goes on from the checkpoint of step {step}", step=step, plan_origin=PlanOrigin(live)
        )
    return View(
        epoch=0, live=live, reason="the run starts", step=0, source=0, behind=live[1:], plan_origin=PlanOrigin(live)
    )


def next_view(
    view: View,
    reports: Mapping[GroupId, Report],
    dead: Mapping[GroupId, str],
    silent: Mapping[GroupId, str],
    reason: str,
    asking: Mapping[GroupId, JoinRequested] | None = None,
    noticed: str = "",
) -> View | None:
    """Return the view to propose, or None while a report is still awaited. The caller sets its ``plan_origin``.

    Args:
        view: the view of the ending epoch.
        reports: group -> its report.
        dead: groups to leave out because of a verdict or in order, with the reason.
        silent: groups to leave out because their report did not come in time, with the reason.
        reason: what ended the epoch.
        asking: groups that ask for a seat; :func:`_entering` decides which of them get one.
        noticed: the same as ``reason`` if that names no culprit (``types.View``), else empty.
    """
    gone = {group: why for group, why in {**silent, **dead}.items() if group in view.live}
    live = tuple(group for group in view.live if group not in gone)
    if any(group not in reports for group in live):
        return None
    if not live:
        return View(view.epoch + 1, (), "every group is taken for dead (wipe-out)", lost=gone)
    told = {group: reports[group] for group in live}
    # A group that has just entered and has no state yet does not count in which step is decided.
    step = max((report.step for report in told.values() if report.synced), default=None)
    if step is None and not any(view.incarnations.get(group, 0) == 0 for group in live):
        return _wipe_out(view, live, gone)
    step = step or 0  # a group of the first start has no state, so no group can have committed anything
    attempt = max((r.attempt for r in told.values() if r.synced and r.step == step), default=0)
    source, behind = _state_transfer(view, told, step, attempt)
    holders = {group: r for group, r in told.items() if r.step == step and group not in behind}
    final, missing = _bucket_transfer(holders, behind)
    # A group that enters has the state from which the first attempt of a step begins.
    together = not (behind or final or attempt) and all(r.step == step for r in told.values() if r.synced)
    joined = _entering(view, live, asking or {}) if together else {}
    cause = _cause(gone) or reason
    return View(
        epoch=view.epoch + 1,
        live=tuple(sorted((*live, *joined))),
        reason=cause,
        step=step,
        attempt=attempt,
        lost=gone,
        joined=tuple(joined),
        source=source,
        behind=behind,
        final=final,
        missing=missing,
        incarnations={**view.incarnations, **joined},
        entered={
            **view.entered,
            **dict.fromkeys((*joined, *(g for g in behind if view.entered.get(g) == step - 1)), step),
        },
        reports=tuple(report for _, report in sorted(told.items())),
        noticed=noticed if noticed != cause else "",
    )


def _cause(gone: Mapping[GroupId, str]) -> str:
    """Return why groups are left out, as one sentence. A survivor's broken connection is a consequence, not a cause."""
    causes = list(dict.fromkeys(why for _, why in sorted(gone.items())))
    more = len(causes) - _CAUSES
    return "; ".join(causes[:_CAUSES]) + (f"; and {more} more" if more > 0 else "")


def _wipe_out(view: View, live: tuple[GroupId, ...], gone: Mapping[GroupId, str]) -> View:
    """Return the view without members: all groups with the model are lost, before those that had just entered got it."""
    why = f"no live group has the model state any more (wipe-out): {_cause(gone)}"
    return View(view.epoch + 1, (), why, lost={**gone, **dict.fromkeys(live, why)})


def admissible(view: View, asked: JoinRequested) -> bool:
    """Return whether the group that asks could enter beside the members of ``view``: all its donors are members, and it
    is not.

    The donors have then committed the same as all members: they cannot have been left out with a version of a step that
    the others made again.
    """
    seated = all(view.seats(*donor) for donor in asked.donors)
    return bool(asked.donors) and seated and asked.group not in view.live


def _entering(view: View, live: tuple[GroupId, ...], asking: Mapping[GroupId, JoinRequested]) -> dict[GroupId, int]:
    """Return the groups, with their incarnations, that get a seat beside ``live``.

    The caller has checked that all of ``live`` hold the same state and that no bucket of the step is final: a group
    that enters has neither, and is handed nothing. A group that can commit the step before by itself has not done so
    yet: if all groups that have committed it are lost, the run goes back to that step.
    """
    left = replace(view, live=live)
    return {group: asked.incarnation for group, asked in sorted(asking.items()) if admissible(left, asked)}


def follows(view: View, report: Report) -> bool:
    """Return whether the member that reports has entered without the state, and is getting it by itself."""
    return not report.synced and view.incarnations.get(report.group, 0) > 0


def _state_transfer(
    view: View, told: Mapping[GroupId, Report], step: int, attempt: int
) -> tuple[GroupId | None, tuple[GroupId, ...]]:
    """Return the group that hands over the state that ``step`` starts from, and the groups that need it.

    A group that has passed the gate of step s works on s+1: s is decided, and the others catch up by one step instead
    of reducing again; if they hold every bucket of s, they only have to commit it. When no group is synced yet (the run
    has just started), the state is the initial model of the lowest group. A group that follows gets the state by itself.
    A group in an earlier attempt of ``step`` takes the state too: what an attempt was discarded for is part of it.
    """
    lowest = min((report.step for report in told.values() if report.synced), default=step)
    assert step - lowest <= 1, f"live groups are {step - lowest} steps apart: {told}"
    stands = {group for group, r in told.items() if r.synced and (r.step, r.attempt) == (step, attempt)}
    synced = sorted(stands)
    source = synced[0] if synced else min(group for group, report in told.items() if not follows(view, report))
    behind = tuple(
        group
        for group, report in sorted(told.items())
        if group != source
        and group not in stands
        and not (report.synced and report.step < step and report.complete)
        and not follows(view, report)
    )
    return (source, behind) if behind else (None, ())


def _bucket_transfer(
    holders: Mapping[GroupId, Report], behind: tuple[GroupId, ...]
) -> tuple[dict[Bucket, GroupId], dict[Bucket, tuple[GroupId, ...]]]:
    """Return for each final bucket the group that hands it over, and the groups that lack it.

    A bucket that any survivor saw finished is final; the lowest group that has it hands it over.
    """
    owners: dict[Bucket, GroupId] = {}
    for group in sorted(holders):
        for bucket in holders[group].reduced_buckets:
            owners.setdefault(bucket, group)
    missing = {
        bucket: tuple(sorted((*(group for group in holders if bucket not in holders[group].reduced_buckets), *behind)))
        for bucket in sorted(owners)
    }
    return dict(sorted(owners.items())), {bucket: groups for bucket, groups in missing.items() if groups}
