"""The microbatch quotas of groups that may only leave (ReCoVer, arXiv 2605.11215, versatile workload).

The invariant: every step contributes B = W_init * G_init microbatches, whichever groups are left. The live groups stand
in one order, ``[majors | major spares | minor | minor spares]``. Majors contribute G microbatches, at most one minor
the remainder B - majors * G. Spares compute as much as the role that they are a spare of, and contribute zeros until
promoted.

- A lost group that has a matching spare is replaced by it: the first spare moves up, and nothing is recomputed.
- Without a matching spare the loss is a *policy boundary*: every survivor computes b more microbatches, the last z of
  them (*boundary minors*) b - 1, so that B are contributed; from the next step on the roles are dealt out anew.

There is no placement: any group can compute any microbatch. As published, a promoted spare contributes its own
microbatches *instead of* the lost ones, so their number is kept and not their identity. With ``exact``, each spare computes
what one contributor does (``Roles.shadows``), and only that one's loss promotes it: the step keeps its microbatches, and
any other loss is a policy boundary, which costs b microbatches. A run is exact; planner and simulator know both.

Assumed: groups only leave (no rejoin), and all groups hear of the same losses in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal

from megatron_ft.core.scheduling.assignment import microbatches_of_step
from megatron_ft.types import GroupId, Plan, listed

MINOR_SPARES_OF_TEN = 2
"""The number of spares, of ten, that stand by for the minor (the paper: about 80% major, 20% minor)."""


@dataclass(frozen=True)
class Roles:
    """The live groups in their order, with their contributions to the running step.

    Attributes:
        W_init: number of groups at the start.
        G_init: microbatches of each group at the start.
        quota: the present G, the microbatches of a major.
        majors: groups that contribute ``quota`` microbatches each.
        major_spares: groups that stand by for a major.
        minor: the group that contributes the remainder; at most one.
        minor_spares: groups that stand by for the minor.
        contributed: the account of the running step: microbatches that each live group computes and contributes.
        boundary: True if a policy boundary has been passed in the running step, so that account and roles differ until
            ``next_step``.
        shadows: spare -> the contributor whose microbatches it computes in the running step, and their number.
    """

    W_init: int
    G_init: int
    quota: int
    majors: tuple[GroupId, ...]
    major_spares: tuple[GroupId, ...] = ()
    minor: tuple[GroupId, ...] = ()
    minor_spares: tuple[GroupId, ...] = ()
    contributed: Mapping[GroupId, int] = field(default_factory=dict)
    boundary: bool = False
    shadows: Mapping[GroupId, tuple[GroupId, int]] = field(default_factory=dict)

    @property
    def B(self) -> int:
        """The number of microbatches of every step."""
        return self.W_init * self.G_init

    @property
    def live(self) -> tuple[GroupId, ...]:
        """The live groups in the order of the shrunken communicator."""
        return self.majors + self.major_spares + self.minor + self.minor_spares

    @property
    def W(self) -> int:
        return len(self.live)

    @property
    def remainder(self) -> int:
        """The number of microbatches that the minor contributes; 0 if there is none."""
        return self.B - len(self.majors) * self.quota


@dataclass(frozen=True)
class Recovery:
    """The recovery from a loss.

    Attributes:
        kind: ``spare`` (only spares were lost), ``promotion``, ``boundary`` or ``wipe-out`` (no group is left).
        roles: the roles after the loss; with ``wipe-out`` those before.
        reason: why, for people.
        promoted: lost group -> the spare that takes its role.
        b: further microbatches that each survivor computes in the running step; 0 without a boundary.
        z: number of boundary minors, which compute b - 1.
    """

    kind: Literal["spare", "promotion", "boundary", "wipe-out"]
    roles: Roles
    reason: str
    promoted: Mapping[GroupId, GroupId] = field(default_factory=dict)
    b: int = 0
    z: int = 0


def initial(W: int, G: int) -> Roles:
    """Return the roles of W groups that contribute G microbatches each: all are majors, and none is a spare."""
    return dealt(W, G, range(W))


def dealt(W: int, G: int, live: Collection[GroupId]) -> Roles:
    """Return the roles with which the groups ``live`` begin, in a run of W groups with G microbatches each."""
    return next_step(_deal(Roles(W, G, G, tuple(sorted(live)))))


def next_step(roles: Roles) -> Roles:
    """Open the account of the next step: majors G, the minor the remainder, spares nothing."""
    account = dict.fromkeys(roles.live, 0) | dict.fromkeys(roles.majors, roles.quota)
    account |= dict.fromkeys(roles.minor, roles.remainder)
    of_majors = {
        spare: (roles.majors[n % len(roles.majors)], roles.quota) for n, spare in enumerate(roles.major_spares)
    }
    of_minor = {spare: (minor, roles.remainder) for minor in roles.minor for spare in roles.minor_spares}
    return replace(roles, contributed=account, boundary=False, shadows=of_majors | of_minor)


def on_failure(roles: Roles, lost: Collection[GroupId], exact: bool = False) -> Recovery:
    """Promote matching spares, or pass a policy boundary (versatile workload).

    Args:
        roles: the roles of the running step.
        lost: live groups that are lost.
        exact: a spare matches only the contributor whose microbatches it computes; False: as published, any of its kind.

    Losses that can be matched are matched first, then the boundary divides the microbatches still missing. After a
    boundary the account of the running step no longer follows the roles, so another loss in the same step is a boundary
    again.
    """
    gone, names = set(lost), listed(sorted(lost))
    if gone == set(roles.live):
        return Recovery("wipe-out", roles, f"wipe-out: group {names} lost, no group is left")
    shrunk, promoted = _promote(roles, gone, exact)
    if sum(shrunk.contributed.values()) < roles.B:
        return _boundary(shrunk, names, promoted)
    if roles.boundary:
        shrunk = _deal(shrunk)
        if not promoted:
            return Recovery("spare", shrunk, f"group {names} lost with nothing to contribute; then G = {shrunk.quota}")
    if not promoted:
        return Recovery("spare", shrunk, f"spare group {names} lost, nothing follows")
    pairs = ", ".join(f"group {spare} for group {dead}" for dead, spare in promoted.items())
    return Recovery("promotion", shrunk, f"group {names} lost; promoted: {pairs}", promoted)


def plan(roles: Roles, step: int, shards: int, per_shard: int) -> Plan:
    """Return the plan of a step: the B ids in order, dealt to majors and minor in their order, each exactly once."""
    ids, fresh = iter(microbatches_of_step(step, shards, per_shard)), next_step(roles)
    assignment = {group: tuple(islice(ids, fresh.contributed[group])) for group in roles.live}
    spares = len(roles.major_spares) + len(roles.minor_spares)
    minor = f", one minor with {roles.remainder}" if roles.minor else ""
    majors = f"{len(roles.majors)} majors with {roles.quota}"
    reason = f"{roles.W} of {roles.W_init} groups live: {majors}{minor}, {spares} spares"
    standby = {spare: (assignment[of],) for spare, (of, _) in fresh.shadows.items()}
    return Plan(step, assignment, reason, standby=standby)


def patch(running: Plan, recovery: Recovery) -> Plan:
    """Return the plan of the running step after a loss: promoted spares and boundary work take over the lost ids.

    A promoted spare that has lost ids as its standby part contributes that part. All other ids have to be computed.
    """
    account = recovery.roles.contributed
    kept = {group: running.of(group) for group in recovery.roles.live}
    lost = [m for group in sorted(set(running.assignment) - set(kept)) for m in running.of(group)]
    for spare in recovery.promoted.values():
        kept[spare] += tuple(chain.from_iterable(p for p in running.standby.get(spare, ()) if p[0] in lost))
    covered = set(chain.from_iterable(kept.values()))
    pool = [microbatch for microbatch in lost if microbatch not in covered]
    patched, at = {}, 0
    for group, own in kept.items():
        more = account[group] - len(own)
        assert more >= 0, f"group {group} has {len(own)} microbatches of step {running.step}, not {account[group]}"
        patched[group] = own + tuple(pool[at : at + more])
        at += more
    assert at == len(pool), f"{len(pool)} microbatches lost in step {running.step}, {at} taken over"
    running = running.without_standby_of(running.assignment.keys() - kept.keys())
    return replace(running, assignment=patched, reason=recovery.reason, patched=running.patched | set(pool))


def _promote(roles: Roles, gone: set[GroupId], exact: bool) -> tuple[Roles, dict[GroupId, GroupId]]:
    """Take the lost groups out; the first matching spare of each lost contributor moves up, if there is one."""
    shrunk, promoted = _without(roles, gone), dict[GroupId, GroupId]()
    for dead in (group for group in roles.live if group in gone and roles.contributed[group]):
        kind, spare_kind = ("majors", "major_spares") if dead in roles.majors else ("minor", "minor_spares")
        if exact:
            matching = tuple(s for s in shrunk.live if shrunk.shadows.get(s, (None, 0))[0] == dead)
        else:
            matching = () if roles.boundary else getattr(shrunk, spare_kind)
        if not matching:
            continue
        promoted[dead] = spare = matching[0]
        size = shrunk.shadows[spare][1]
        # Another spare of the lost group stands by for the one that has moved up.
        others = {s: (spare if of == dead else of, n) for s, (of, n) in shrunk.shadows.items() if s != spare}
        account = {**shrunk.contributed, spare: shrunk.contributed[spare] + size}
        shrunk = replace(shrunk, contributed=account, shadows=others)
        if not roles.boundary:
            rest = tuple(group for group in getattr(shrunk, spare_kind) if group != spare)
            moved: dict[str, Any] = {kind: (*getattr(shrunk, kind), spare), spare_kind: rest}
            shrunk = replace(shrunk, **moved)
    return shrunk, promoted


def _boundary(shrunk: Roles, names: str, promoted: Mapping[GroupId, GroupId]) -> Recovery:
    """Pass a boundary: b is the least b >= 1 with contributed + W * b >= B; z = contributed + W * b - B groups are
    boundary minors."""
    B, W, contributed = shrunk.B, shrunk.W, sum(shrunk.contributed.values())
    b = -(-(B - contributed) // W)
    z = contributed + W * b - B
    account = {group: shrunk.contributed[group] + b - (place >= W - z) for place, group in enumerate(shrunk.live)}
    anew = _deal(replace(shrunk, contributed=account, boundary=True))
    reason = (
        f"group {names} lost without a matching spare: policy boundary, {B - contributed} of {B} microbatches missing, "
        f"{b} more for each of {W} groups{f', {b - 1} for {z} of them' if z else ''}; then G = {anew.quota}"
    )
    return Recovery("boundary", anew, reason, promoted, b, z)


def _deal(roles: Roles) -> Roles:
    """Deal the roles out anew: G = least G with W * G >= B, majors = floor(B / G), the minor takes the remainder."""
    order = roles.live
    quota = -(-roles.B // len(order))
    majors = roles.B // quota
    minor = 1 if roles.B % quota else 0
    spares = len(order) - majors - minor
    minor_spares = (spares * MINOR_SPARES_OF_TEN + 5) // 10 if minor else 0
    cuts = [majors, majors + spares - minor_spares, len(order) - minor_spares]
    return replace(
        roles,
        quota=quota,
        majors=order[: cuts[0]],
        major_spares=order[cuts[0] : cuts[1]],
        minor=order[cuts[1] : cuts[2]],
        minor_spares=order[cuts[2] :],
    )


def _without(roles: Roles, gone: set[GroupId]) -> Roles:
    def rest(groups: tuple[GroupId, ...]) -> tuple[GroupId, ...]:
        return tuple(group for group in groups if group not in gone)

    return replace(
        roles,
        contributed={group: count for group, count in roles.contributed.items() if group not in gone},
        majors=rest(roles.majors),
        major_spares=rest(roles.major_spares),
        minor=rest(roles.minor),
        minor_spares=rest(roles.minor_spares),
        shadows={spare: of for spare, of in roles.shadows.items() if spare not in gone},
    )
