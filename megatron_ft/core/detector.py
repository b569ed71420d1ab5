"""Fault detector: what a signal means.

Intuition: a signal either names a culprit or only says that something is wrong. An agent that waited for a process
knows who died and why, so its notice is a verdict. A reset connection, a collective's timeout or a peer's call for help
names nobody: gloo's exception never says who is lost, and every survivor that gives up resets its neighbours in turn.
Such a signal ends the epoch, and who is missing shows in who reports (``core.membership``).

An agent also looks at its ranks while they live (``core.health``): one that is stopped or stuck is accused by name, and
out like a dead one.

Assumes: agents tell the truth about their own children; a notice may arrive late, twice or about a group that is no
longer a member, and is ignored then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ft.core.links import Unit
from megatron_ft.core.protocol import Asked, Broke, Died, Leaves, Missed
from megatron_ft.core.saving import Saves, Stops
from megatron_ft.types import Exit, GroupId, Microbatch, View


@dataclass(frozen=True)
class Ended:
    """An agent saw one of its processes end. ``incarnation`` numbers the starts of that group."""

    exit: Exit
    incarnation: int = 0


@dataclass(frozen=True)
class Reset:
    """A collective of ``epoch`` failed at group ``by``: reset, timeout, or any other error of the network. Or the group has
    ended it for a reason that others may not know, for all that work on a step later than ``after``."""

    epoch: int
    by: GroupId
    detail: str
    after: int = -1


@dataclass(frozen=True)
class GivenUp:
    """An agent gave up one of its living processes: stopped, or stuck in one piece of work (``core.health``)."""

    group: GroupId
    position: int
    pid: int
    host: str
    why: str
    incarnation: int = 0


@dataclass(frozen=True)
class Silent:
    """The agent of host ``by`` hears nothing of host ``about``; ``heard`` takes it back. Both with their groups: hosts have
    whole groups, or both have a part of one and the same, or of two. Whatever comes late, ``core.places`` and these tell of
    what: ``incarnation``: of the group that both have a part of, the one that ``by`` has started last; ``since``: of groups
    that have come from another host, the start of which on ``by`` knows them to be where they are."""

    by: str
    about: str
    groups_by: tuple[GroupId, ...]
    groups_about: tuple[GroupId, ...]
    silent_s: float
    heard: bool = False
    incarnation: int = 0
    since: tuple[tuple[GroupId, int], ...] = ()

    @property
    def units(self) -> tuple[Unit, Unit]:
        """Which pair of hosts it is about, as the protocol knows them."""
        return self.groups_by, self.groups_about


@dataclass(frozen=True)
class Leaving:
    """The group says so itself: it leaves in order after step ``after``, so nothing of its work is lost."""

    group: GroupId
    after: int
    why: str
    incarnation: int = 0


@dataclass(frozen=True)
class Asking:
    """A new incarnation says so itself: it follows ``donors``, which work on ``after`` at most, and wants a seat."""

    group: GroupId
    incarnation: int
    donors: tuple[tuple[GroupId, int], ...]
    after: int


@dataclass(frozen=True)
class Dismissed:
    """An operator, or one of its ranks, wants the group to leave. Nobody's verdict: the group's leader says after which step
    it does."""

    group: GroupId
    why: str


@dataclass(frozen=True)
class Housed:
    """Host ``host``, which has come later than the first, runs these ranks, (group, position) of each, from that start of
    their group on: new ones, or those that were another's. None: it is idle. Between agents only."""

    host: int
    name: str
    address: str
    port: int
    copies: int
    ranks: tuple[tuple[GroupId, int], ...]
    incarnation: int


@dataclass(frozen=True)
class Refused:
    """``host`` does not start its part of the group again, after that incarnation. Between agents only."""

    host: int
    group: GroupId
    incarnation: int


@dataclass(frozen=True)
class Agreed:
    """The view of ``epoch`` stands: nobody has to go on looking for it."""

    epoch: int


@dataclass(frozen=True)
class Over:
    """The run has got to its end."""


Signal = (
    Ended | Reset | GivenUp | Silent | Leaving | Asking | Dismissed | Housed | Refused | Saves | Stops | Agreed | Over
)  # fmt: skip


Verdict = Died | Broke | Missed | Leaves | Asked | Dismissed | Housed | Refused | Saves | Stops | Agreed | Over
"""What a signal comes to: an event of the protocol; or a wish, or a word about hosts, checkpoints or views, which is
none."""


def once(signal: Signal) -> str | None:
    """The name under which several may say the same, and one of them is enough; None where each counts."""
    match signal:
        case Reset(epoch=epoch, after=after):
            return f"reset {epoch} {after}"
        case Agreed(epoch=epoch):
            return f"agreed {epoch}"
        case Over():
            return "over"
    return None


def judge(signal: Signal) -> Verdict:
    """The verdict a signal leads to. Whether it still concerns anybody is for ``core.recovery`` to say.

    One dead rank takes its whole group out: its healthy ranks cannot go on without it (architecture.md, *group*).
    """
    match signal:
        case Ended(exit=exit_, incarnation=incarnation):
            return Died(exit_.group, str(exit_), incarnation, _blamed(exit_))
        case GivenUp(group=group, position=position, pid=pid, host=host, why=why, incarnation=incarnation):
            return Died(group, f"rank {position} on {host} (pid {pid}) {why}", incarnation)
        case Reset(epoch=epoch, by=by, detail=detail, after=after):
            return Broke(epoch, f"group {by}: {detail}", after)
        case Leaving(group=group, after=after, why=why, incarnation=incarnation):
            return Leaves(group, after, f"leaves after step {after}: {why}", incarnation)
        case Dismissed() | Housed() | Refused() | Saves() | Stops() | Agreed() | Over():
            return signal
        case Asking(group=group, incarnation=incarnation, donors=donors, after=after):
            return Asked(group, incarnation, donors, after)
        case Silent(by=by, about=about, heard=heard, silent_s=silent_s, incarnation=incarnation):
            nothing = f"host {by} has heard nothing of host {about} for {silent_s:.1f} s"
            reason = f"host {by} hears host {about} again" if heard else nothing
            shared = set(signal.groups_by) & set(signal.groups_about)
            if shared and not heard:  # a group that has ranks on both: whichever of them is cut off, it has come apart
                return Died(min(shared), f"{reason}, and the group has ranks on both", incarnation)
            return Missed(signal.groups_by, signal.groups_about, reason, heard)
    raise TypeError(f"judge: {signal!r} is not a signal")


def ends(verdict: Verdict, view: View, step: int) -> bool:
    """Whether the verdict ends the epoch of ``view`` for who works on ``step``: it may not wait in it any more.
    ``core.recovery`` closes it."""
    match verdict:
        case Died(group=group, incarnation=incarnation):
            return group in view.live and incarnation >= view.incarnations.get(group, 0)
        case Broke(epoch=epoch, after=after):
            return epoch == view.epoch and after < step
        case Missed(by=by, about=about, heard=heard):
            return not heard and all(set(unit) & set(view.live) for unit in (by, about))
    return False  # who leaves in order is waited for; that somebody's request has ended an epoch is announced


def in_order(verdict: Verdict) -> bool:
    """Whether one that ends an epoch does so without a failure: who is still in the step before finishes that first."""
    return isinstance(verdict, Broke) and verdict.in_order


def _blamed(exit_: Exit) -> Microbatch | None:
    """The microbatch that may have ended the process: who was killed by a signal was not at work on it by chance only.

    What a dying process wrote may be torn; then it accuses nothing.
    """
    if exit_.signal is not None or exit_.microbatch is None:
        return None
    try:
        return Microbatch.parse(exit_.microbatch)
    except ValueError:
        return None


_KINDS: dict[type, str] = {
    Reset: "reset",
    GivenUp: "given-up",
    Silent: "silent",
    Leaving: "leaving",
    Asking: "asking",
    Dismissed: "dismissed",
    Housed: "housed",
    Refused: "refused",
    Saves: "saves",
    Stops: "stops",
    Agreed: "agreed",
    Over: "over",
}


def to_json(signal: Signal) -> dict[str, Any]:
    """The wire form of a signal on the control store's notice log."""
    if isinstance(signal, Ended):
        return {"kind": "ended", "incarnation": signal.incarnation, **vars(signal.exit)}
    return {"kind": _KINDS[type(signal)], **vars(signal)}


def from_json(raw: dict[str, Any]) -> Signal:
    """Inverse of :func:`to_json`. Raises ``ValueError`` for a kind this version does not know."""
    fields = {key: value for key, value in raw.items() if key != "kind"}
    if raw["kind"] == "ended":
        incarnation = fields.pop("incarnation")
        return Ended(Exit(**fields), incarnation)
    for kind, name in _KINDS.items():
        if raw["kind"] == name:
            return kind(**{key: _tupled(value) for key, value in fields.items()})
    raise ValueError(f"notice of kind {raw['kind']!r} is not known; do all nodes run the same megatron_ft?")


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
