"""Strangers send random bytes to every port of a run while it trains: they cost it nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable

import pytest

from megatron_ft.cluster.faults import kill as inject
from tests import fuzz, listening, support

GROUPS, INPUTS = 2, 200
ANSWER_S = 0.5
"""Seconds that a listener has to accept a connection and to begin a handshake. Sockets of libraries do neither."""
FUZZED = (2, 3, 4, 5)
"""Steps that the ports get their inputs before and in."""
MOST_MORE = 20
"""Limit for the number of descriptors, and of threads, that a process may have in addition: a listener holds 16 strangers
at a time, and a save needs a few for itself."""


@pytest.mark.long
def test_random_input_to_every_port_of_a_run_that_trains_changes_nothing(tmp_path, data_dir):
    """Every listening socket of agent, store and ranks is found in proc(5) and gets random input while steps are made,
    the control store's TCPStore included. The gloo sockets accept no connection, because their communicators are
    complete. Two things that strangers can do all the same (docs/security.md, "What stays open") are left out:
    requests with keys of the run at the store, and connections to a gloo socket while its communicator is built."""
    checkpoint = {"directory": str(tmp_path / "saved"), "memory_gb": 0.1}
    gate = support.Gate(tmp_path, *FUZZED, FUZZED[-1] + 1)
    options = {"script": gate.script, "groups": GROUPS, "rejoin": {"enabled": True}, "checkpoint": checkpoint}
    run = support.start(tmp_path / "run", data_dir, **options)
    reference = support.start(tmp_path / "reference", data_dir, groups=GROUPS)
    support.wait_for(lambda: gate.waiting(FUZZED[0]) == GROUPS, run)
    found = listening.of_tree(run.process.pid)
    throw = Throw(found)
    # The donor of each rank, the copies, the store, the heartbeats; the communicator of each rank.
    assert (len(throw.gives), throw.shut) == (GROUPS + 3, GROUPS), found
    before = used(found)
    for step in FUZZED:
        for _ in range(INPUTS // len(FUZZED)):
            throw()
        gate.open(step)
        support.wait_for(lambda step=step: throw() or gate.waiting(step + 1) == GROUPS, run)
    assert throw.refused == 0
    after = used(found)
    assert all(after[pid][kind] <= before[pid][kind] + MOST_MORE for pid in before for kind in (0, 1)), (before, after)
    assert [line["epoch"] for line in run.events("view")] == [0]

    inject.kill(run.directory, 1, "anywhere")
    gate.open()
    support.wait_for(lambda: throw() or any(line["lost"] for line in run.events("view")), run)
    reference.check()
    output = run.check(reference)
    _, killed, *others = run.events("view")
    assert list(killed["lost"]) == ["1"] and "SIGKILL" in killed["reason"], killed
    assert all(view["joined"] == [1] and not view["lost"] for view in others), others
    assert not run.events("forged")
    assert "Traceback" not in (said := output + run.logs()) and "Exception in thread" not in said


class Throw:
    """One random input to each of the sockets. ``shut`` is the number of those that accept no connection, ``refused``
    counts later failures to connect."""

    def __init__(self, found: set[listening.Listener]) -> None:
        self.gives, self._rng, self.shut, self.refused = [], random.Random(0), 0, 0
        for protocol, address in {(listener.protocol, (listener.address, listener.port)) for listener in found}:
            try:
                self.gives.append(_giver(protocol, address))
            except TimeoutError:
                self.shut += 1

    def __call__(self) -> None:
        for give in self.gives:
            try:
                give(self._rng)
            except ConnectionError:
                self.refused += 1


def _giver(protocol: str, address: tuple[str, int]) -> Callable[[random.Random], None]:
    if protocol == "udp":
        return fuzz.datagrams(address, fuzz.noise)
    with socket.create_connection(address, timeout=ANSWER_S) as end, contextlib.suppress(TimeoutError):
        if end.recv(4, socket.MSG_WAITALL) == b"mft2":
            return fuzz.as_stranger(address)
    return fuzz.as_passer_by(address)


def used(found: set[listening.Listener]) -> dict[int, tuple[int, int]]:
    """Return the number of descriptors and of threads of each process."""
    pids = {listener.pid for listener in found}
    return {pid: (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))) for pid in pids}
