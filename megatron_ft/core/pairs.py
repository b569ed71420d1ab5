"""Who is bad, from what every pair of hosts has measured: a host, a link between two, or nobody.

Intuition. A slow or dead pair accuses both of its hosts. A bad host is bad with nearly everybody, so it collects
accusations; its well neighbours have one each. So the host with the most bad pairs is named first, if these are most of its
pairs, then what it is part of is left out, and so on; what remains is a matter between two hosts, a *link*.

What is usual is the value that a quarter of all ways reach, not their median: with one bad host among three, two of three
pairs are bad, and the median would be a bad one. Values that lie within ``factor`` of each other therefore name nobody.

TCP needs both ways: when either loses what is sent, no connection is made at all. Datagrams tell which of them it is.

Assumes: pairs were measured when neither host was in another measurement. There may be many hosts and only some of their
pairs (:func:`rounds`). Half of the hosts that are bad with the other half, and well among themselves, name nobody: it is
the network between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

FACTOR = 3.0
MOST_ROUNDS = 15
"""All pairs of up to 16 hosts."""
_LEAST_LATE_S = 0.005
"""A round trip that is longer by less may be a busy processor's doing, whatever the factor."""
_QUARTER = 4

CUT, LOST, REFUSED, CLOSED, SLOW, LATE = "cut", "lost", "refused", "closed", "slow", "late"

Pair = tuple[int, int]
"""Two hosts. In order where it is a way, the lower one first where it is both."""


@dataclass(frozen=True)
class Way:
    """From one host to another. ``opens``: a connection that way is accepted and answered; ``why`` not. ``heard``: a
    datagram arrived, which matters where no connection does. None: not measured."""

    opens: bool
    why: str = ""
    heard: bool = False
    rtt_s: float | None = None
    bytes_s: float | None = None


@dataclass(frozen=True)
class Trouble:
    """``what`` is wrong on the way from ``sender`` to ``receiver``; both ways where it is CUT, CLOSED or LATE.

    ``value`` and ``usual``: bytes per second where it is SLOW, seconds of a round trip where it is LATE.
    """

    what: str
    sender: int
    receiver: int
    value: float = 0.0
    usual: float = 0.0

    def words(self, names: Mapping[int, str]) -> str:
        """For people."""
        a, b = names[self.sender], names[self.receiver]
        return {
            CUT: f"nothing passes between {a} and {b}, either way",
            LOST: f"what {a} sends does not reach {b}; the other way passes",
            REFUSED: f"{b} takes no connection from {a}, the other way passes (a firewall?)",
            CLOSED: f"between {a} and {b} no connection is made, though datagrams pass (a firewall?)",
            SLOW: f"{a} sends to {b} {rate(self.value)}, usual are {rate(self.usual)}",
            LATE: f"round trips between {a} and {b} take {milliseconds(self.value)}, usual are {milliseconds(self.usual)}",
        }[self.what]


@dataclass(frozen=True)
class BadHost:
    """One whose pairs are bad with most others: ``pairs`` of them were measured; it is well with ``well_with``."""

    host: int
    troubles: tuple[Trouble, ...]
    pairs: int
    well_with: tuple[int, ...]

    def words(self, names: Mapping[int, str]) -> str:
        """What is wrong, kind by kind."""
        parts = []
        for what in (CUT, LOST, REFUSED, CLOSED, SLOW, LATE):
            for sends in (True, False):
                own = [t for t in self.troubles if t.what == what and (t.sender == self.host) is sends]
                if what in (CUT, CLOSED, LATE):
                    own = [t for t in self.troubles if t.what == what] if sends else []
                if own:
                    parts.append(self._kind(what, sends, own, names))
        if self.well_with:
            parts.append(f"well with {listed(names[host] for host in self.well_with)}")
        return "; ".join(parts)

    def _kind(self, what: str, sends: bool, own: Sequence[Trouble], names: Mapping[int, str]) -> str:
        others = sorted({t.receiver if t.sender == self.host else t.sender for t in own})
        who = f"{listed(names[host] for host in others)} ({len(others)} of {self.pairs} measured)"
        value, usual = median(t.value for t in own), own[0].usual
        return {
            CUT: f"nothing passes between it and {who}",
            LOST: f"what it sends does not reach {who}" if sends else f"what is sent by {who} does not reach it",
            REFUSED: f"it can open no connection to {who}" if sends else f"it takes no connection from {who}",
            CLOSED: f"no connection is made with {who}, though datagrams pass",
            SLOW: f"{'sends to' if sends else 'receives from'} {who} at {rate(value)}, usual are {rate(usual)}",
            LATE: f"round trips of {milliseconds(value)} with {who}, usual are {milliseconds(usual)}",
        }[what]


@dataclass(frozen=True)
class Judgement:
    """Who is bad, and which links between two hosts that are not. ``usual_*``: None where nothing was measured."""

    hosts: tuple[BadHost, ...]
    links: tuple[Trouble, ...]
    usual_rtt_s: float | None
    usual_bytes_s: float | None


# --- who is measured with whom, and when ------------------------------------------------------------------------------


def rounds(hosts: Sequence[int], most: int = MOST_ROUNDS) -> list[list[Pair]]:
    """A round-robin tournament: in each round no host is in two pairs, over all rounds each pair is there once.

    With more rounds than ``most``, so many of them, evenly chosen: every host is then in as many pairs as any other (one
    less, where their number is odd).
    """
    seats: list[int | None] = [*hosts, None] if len(hosts) % 2 else [*hosts]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        drawn = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([_pair(a, b) for a, b in drawn if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    found = [pairs for pairs in found if pairs]
    return found if len(found) <= most else [found[k * len(found) // most] for k in range(most)]


def apart(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """These pairs in rounds in which no host is twice."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = next((some for some in found if not any(set(pair) & set(other) for other in some)), None)
        if free is None:
            found.append([pair])
        else:
            free.append(pair)
    return found


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


# --- what is wrong ----------------------------------------------------------------------------------------------------


def judge(ways: Mapping[Pair, Way], factor: float = FACTOR) -> Judgement:
    """Who is bad. ``ways``: (sender, receiver) of what was measured; ``factor``: slower than usual by so much is bad."""
    rtt_s, bytes_s = _usual(ways)
    troubles = {pair: _troubles(pair, ways, rtt_s, bytes_s, factor) for pair in _measured(ways)}
    bad = {pair for pair, found in troubles.items() if found}
    named = _named(set(troubles), bad)
    hosts = []
    for host in sorted(named):
        own = sorted(pair for pair in troubles if host in pair)
        well = (other for pair in own if pair not in bad for other in pair if other != host)
        found = tuple(trouble for pair in own for trouble in troubles[pair])
        hosts.append(BadHost(host, found, len(own), tuple(sorted(well))))
    links = tuple(t for pair in sorted(bad) if not named & set(pair) for t in troubles[pair])
    return Judgement(tuple(hosts), links, rtt_s, bytes_s)


def suspects(ways: Mapping[Pair, Way], factor: float = FACTOR) -> set[Pair]:
    """The pairs that deserve a second look before anybody is named."""
    usual = _usual(ways)
    return {pair for pair in _measured(ways) if _troubles(pair, ways, *usual, factor)}


def better(first: Way | None, second: Way | None) -> Way | None:
    """Of two measurements of one way what it can do: disturbances only make it look worse."""
    if first is None or second is None:
        return second if first is None else first
    if first.opens != second.opens:
        return first if first.opens else second
    rtts = [some.rtt_s for some in (first, second) if some.rtt_s is not None]
    rates = [some.bytes_s for some in (first, second) if some.bytes_s is not None]
    return replace(
        second,
        heard=first.heard or second.heard,
        rtt_s=min(rtts, default=None),
        bytes_s=max(rates, default=None),
    )


def _measured(ways: Mapping[Pair, Way]) -> set[Pair]:
    return {_pair(*way) for way in ways}


def _usual(ways: Mapping[Pair, Way]) -> tuple[float | None, float | None]:
    """Round trip and rate that a quarter of the ways reach."""
    rtts = sorted(way.rtt_s for way in ways.values() if way.rtt_s is not None)
    rates = sorted((way.bytes_s for way in ways.values() if way.bytes_s is not None), reverse=True)
    rtt_s, bytes_s = (some[(len(some) - 1) // _QUARTER] if some else None for some in (rtts, rates))
    return rtt_s, bytes_s


def _troubles(
    pair: Pair, ways: Mapping[Pair, Way], rtt_s: float | None, bytes_s: float | None, factor: float
) -> tuple[Trouble, ...]:
    there, back = pair, pair[::-1]
    both = [ways.get(there), ways.get(back)]
    opens = [way is not None and way.opens for way in both]
    if not any(opens):
        heard = [way is not None and way.heard for way in both]
        if all(heard):
            return (Trouble(CLOSED, *pair),)
        return (Trouble(LOST, *(back if heard[0] else there)),) if any(heard) else (Trouble(CUT, *pair),)
    found = []
    for ends, way in zip((there, back), both, strict=True):
        if way is not None and not way.opens:
            found.append(Trouble(REFUSED, *ends))
        if way is not None and way.bytes_s is not None and bytes_s is not None and way.bytes_s * factor < bytes_s:
            found.append(Trouble(SLOW, *ends, way.bytes_s, bytes_s))
    rtts = [way.rtt_s for way in both if way is not None and way.rtt_s is not None]
    if rtts and rtt_s is not None and min(rtts) > max(factor * rtt_s, rtt_s + _LEAST_LATE_S):
        found.append(Trouble(LATE, *pair, min(rtts), rtt_s))
    return tuple(found)


def _named(pairs: Collection[Pair], bad: Collection[Pair]) -> set[int]:
    """The hosts that are bad with most of those that are not, one after the other, the worst first."""
    named: set[int] = set()
    while True:
        left = [pair for pair in pairs if not named & set(pair)]
        counts = {host: [0, 0] for pair in left for host in pair}
        for pair in left:
            for host in pair:
                counts[host][0] += pair in bad
                counts[host][1] += 1
        guilty = {host: (n, n / of, host) for host, (n, of) in counts.items() if n > 1 and 2 * n > of}
        if not guilty:
            break
        named.add(max(guilty, key=guilty.__getitem__))
    among = [pair for pair in pairs if set(pair) <= named]
    others = {host for pair in pairs for host in pair} - named
    if len(named) >= len(others) and any(pair not in bad for pair in among):
        return set()
    return named


# --- words ------------------------------------------------------------------------------------------------------------


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first of them, and how many more."""
    every = list(names)
    shown = every if len(every) <= most + 1 else [*every[:most], f"{len(every) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def rate(bytes_s: float) -> str:
    """10^6 bytes per second."""
    return f"{bytes_s / 1e6:.3g} MB/s" if bytes_s < 999.5e6 else f"{bytes_s / 1e6:.0f} MB/s"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds * 1e3:.0f} ms"
