"""The end of a run before its last step: its exit code, its reason, and whether the job starts again from a checkpoint.

Intuition. A run ends when no group has the *complete state* any more: the model and optimizer that a step starts from.
The rank that ends last is seldom the cause: groups on their way back wait for state, and end because their donors are
gone. So the ending follows from what happened to all groups, and above all from the *deciding loss*: that of the
last group with the complete state. The job starts again

- if that group was taken down from outside: a signal, a host, a link, a rank that was given up;
- if it failed or left in order while another group, which had not failed in the same words, was on its way back: a
  moment later the run would have gone on;
- if the control store was away for too long, or the policy cannot finish the step with the groups that are left.

It does not start again if an operator or the script ended it, if every group failed by itself (it would again), or if
the whole run was halted for a reason that a restart keeps: a broken invariant, a microbatch that kills each group,
``min_groups``.

Every agent has heard of the same losses, so all of them come to the same ending, a spare host included. It passes the
ending on as an exit code, which :func:`starts_again` reads for every launcher.

Assumes: losses come in the order in which this agent heard of them; those of one start may be several, and repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_ft.core.lifecycle.restart_policy import Kind
from megatron_ft.errors import WIPED_OUT, GroupLeft, InvariantBroken, StoreError, WipedOut
from megatron_ft.types import GroupId


@dataclass(frozen=True)
class Loss:
    """The loss of a rank, and with it of its group's start.

    Attributes:
        group: of the rank.
        incarnation: the start of the group.
        position: of the rank.
        kind: what it means for the group (``restart_policy.kind_of``).
        code: exit code of the rank; None if a signal killed it or it was given up.
        words: what happened to which rank, for people.
        detail: the rank's own last words; empty if there are none.
        state: True if that start had the complete state.
        given_up: True if the whole start was given up, so that the exit codes of its ranks have no meaning any more.
    """

    group: GroupId
    incarnation: int
    position: int
    kind: Kind
    code: int | None
    words: str
    detail: str = ""
    state: bool = True
    given_up: bool = False


@dataclass(frozen=True)
class Ending:
    """How a run has ended: ``code`` is the exit code of its launcher, ``reason`` is for people, and ``cause`` is the loss
    that the reason is about, None where there is none."""

    code: int
    reason: str
    cause: Loss | None = None


def when(last_step: int | None) -> str:
    """Return, for people, how far a run has come; ``last_step`` is the newest committed step, None before the first."""
    return "before the first step" if last_step is None else f"after step {last_step}"


def starts_again(code: int | None) -> bool:
    """Return whether a job whose run has ended with ``code`` starts again from its newest checkpoint. None: no agent was
    left to write how the run ended, so all hosts are lost."""
    return code is None or code == WIPED_OUT


def noted(losses: Sequence[Loss], loss: Loss) -> tuple[Loss, ...]:
    """Return the losses after one more. The first loss of each rank counts; once a start was given up, none of its later
    ones. A loss with the complete state makes those of earlier starts irrelevant."""
    of_start = [k for k in losses if (k.group, k.incarnation) == (loss.group, loss.incarnation)]
    if any(known.given_up or known.position == loss.position for known in of_start):
        return tuple(losses)
    kept = (k for k in losses if k.group != loss.group or k.incarnation >= loss.incarnation or not loss.state)
    return (*kept, loss)


def conclude(
    losses: Sequence[Loss],
    *,
    last_step: int | None,
    members: Collection[tuple[GroupId, int]],
    refused: Collection[GroupId] = (),
    returns: bool = True,
    idle: bool = False,
) -> Ending:
    """Return how a run has ended that has not made its last step.

    Args:
        losses: all losses that are known, in order (:func:`noted`).
        last_step: the newest committed step; None before the first.
        members: the seats of the newest view.
        refused: groups that are not started again.
        returns: lost groups are started again.
        idle: this host has run no rank.
    """
    after = when(last_step)
    if not losses:
        return Ending(WIPED_OUT, f"no group is left {after}") if idle else Ending(1, f"the agent failed {after}")
    complete = [loss for loss in losses if loss.state] or list(losses)
    inside = [loss for loss in complete if (loss.group, loss.incarnation) in members]
    common = (
        [loss for loss in losses if loss.code == InvariantBroken.exit_code]
        or [loss for loss in complete if loss.code == WipedOut.exit_code]
        # Without a control store nothing tells whether a group that stopped was left out or stopped with all others.
        or [loss for loss in inside or complete if loss.code == StoreError.exit_code and last_step is not None]
        or [loss for loss in complete if loss.kind == "over"]
    )
    last = (common or inside or complete)[-1]
    if not common:  # of a group with several ranks the first loss is the cause of the others
        last = next(loss for loss in complete if (loss.group, loss.incarnation) == (last.group, last.incarnation))
    awaited = _on_their_way(losses, last, refused) if returns else ()
    code = _code(last, bool(awaited), last_step is not None)
    if last.detail and (common or not awaited and {loss.detail for loss in complete} == {last.detail}):
        return Ending(code, f"{last.detail} [all groups, {after}]", last)
    if last.code == 0:
        return Ending(code, f"the script ended by itself {after}, before its session.steps() did", last)
    others = f"; on their way back: groups {' '.join(map(str, awaited))}" if awaited else ""
    role = "the last with the complete state" if len(complete) < len(losses) or others else "the last"
    return Ending(code, f"no group is left {after}; {role} was group {last.group}: {last.words}{others}", last)


def _on_their_way(losses: Sequence[Loss], last: Loss, refused: Collection[GroupId]) -> tuple[GroupId, ...]:
    """Return the groups other than that of the deciding loss ``last`` that were about to come back."""
    newest = {loss.group: loss for loss in losses if loss.state and loss.group != last.group}
    away = {
        group
        for group, loss in newest.items()
        if loss.kind == "died" or (loss.kind == "failed" and loss.detail != last.detail)
    }
    return tuple(sorted(away - set(refused)))


def _code(last: Loss, awaited: bool, begun: bool) -> int:
    """Return the exit code of a run that ended with the loss ``last``.

    ``awaited``: other groups were on their way back. ``begun``: a step is committed."""
    match last.kind:
        case "died" if last.code == StoreError.exit_code and not begun:
            return StoreError.exit_code  # there may never have been a store at that address
        case "died":
            return WIPED_OUT
        case "failed" | "left" if awaited:
            return WIPED_OUT
        case "left":
            return GroupLeft.exit_code
        case "ended" if last.code is None:
            return GroupLeft.exit_code  # SIGTERM, before the rank could leave in order
    return last.code or 1
