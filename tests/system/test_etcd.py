"""Three real etcd nodes on loopback: the store's contract, and one node at a time killed or frozen under its clients.

A whole run on them loses two nodes, one after the other, and two groups.
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_ft.core.protocol import signals
from megatron_ft.errors import StoreError
from megatron_ft.record.run_directory import STORE
from megatron_ft.run.injection_points import Breakpoint
from megatron_ft.run.store import AWAY, ControlStore, patient, watcher
from tests import support
from tests.growth import Changes
from tests.store_contract import StoreContract, at_once
from tests.stores import DEADLINE_S, EtcdCluster, await_, etcd_missing

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())]

SILENCE_S = 10.0
PLAYERS = 4


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(etcd):
    """A cluster that is whole before and after each test."""
    etcd.start()
    yield etcd
    for node in etcd.nodes:
        if node.process is not None:
            node.thaw()
    etcd.start()


@pytest.fixture
def served(cluster):
    return ControlStore(cluster.address, uuid.uuid4().hex, SILENCE_S)


class TestEtcd(StoreContract):
    """The contract over three nodes."""


def test_the_store_is_as_small_after_many_view_changes_as_after_a_few(served):
    """The benchmark ``benchmarks/store_growth.py`` makes 2,000 of them."""
    changes = Changes(served)
    changes.make(20)
    keys, size = changes.size()
    changes.make(100)
    keys_then, size_then = changes.size()
    assert keys_then <= 1.1 * keys and size_then <= 1.1 * size
    other = ControlStore(served.address, uuid.uuid4().hex, SILENCE_S)
    other.set("key", 1)
    served.forget()
    assert served.listed() == [] and other.get("key") == 1


class Players:
    """Clients that claim the same keys, one after the other, and remember the standing value and whether they won."""

    def __init__(self, served: ControlStore) -> None:
        self.moves: list[list[tuple[int, bool]]] = [[] for _ in range(PLAYERS)]
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._play, args=(served.clone(), player), daemon=True) for player in range(PLAYERS)
        ]
        for thread in self._threads:
            thread.start()

    def _play(self, store: ControlStore, player: int) -> None:
        own = self.moves[player]
        while not self._stopped.is_set():
            key, by = f"view/{len(own)}", uuid.uuid4().hex
            with contextlib.suppress(*AWAY):
                own.append(
                    patient(lambda key=key, by=by: store.claim(key, player, by), interrupted=self._stopped.is_set)
                )

    def await_moves(self, more: int = 5) -> None:
        goals = [len(own) + more for own in self.moves]
        await_(lambda: all(len(own) >= goal for own, goal in zip(self.moves, goals, strict=True)), "everybody goes on")

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def check(self) -> None:
        """Check for one value per key in all clients, and that its writer alone was told that it won."""
        for key in range(min(len(own) for own in self.moves)):
            (standing,) = {own[key][0] for own in self.moves}
            assert [player for player, own in enumerate(self.moves) if own[key][1]] == [standing]


@pytest.mark.parametrize("who", ["leader", "follower"])
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_while_one_node_is_away_all_clients_go_on_and_every_key_has_one_winner(cluster, served, fault, who):
    players = Players(served)
    players.await_moves()
    node = getattr(cluster, who)()
    getattr(node, fault)()
    players.await_moves()
    node.start() if fault == "kill" else node.thaw()
    players.await_moves()
    players.stop()
    players.check()


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_client_that_waits_hears_of_a_key_although_its_node_is_lost(cluster, served, fault):
    waiting = [served.clone() for _ in range(6)]  # spread over the nodes at random
    node = cluster.leader()
    results: list[object] = []
    threads = [
        threading.Thread(
            target=lambda client=client: results.append(patient(lambda: client.wait("late", DEADLINE_S))), daemon=True
        )
        for client in waiting
    ]
    for thread in threads:
        thread.start()
    getattr(node, fault)()
    patient(lambda: served.set("late", 7), patience_s=DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == [7] * len(waiting)


def test_without_a_majority_calls_fail_in_time_and_the_watcher_reports_it(cluster, served):
    lines: list[object] = []
    listening = watcher.Watcher(
        ControlStore(cluster.address, served.run_id, SILENCE_S),
        lambda verdict: lines.append(verdict.epoch),
        lambda error: lines.append("lost"),
        lambda: lines.append("back"),
    )
    listening.start()
    served.begin()
    watcher.announce(served, signals.EpochAborted(1, "broken", by=0))
    await_(lambda: lines == [1], "the notice is heard")
    nodes = cluster.nodes[:2]
    for node in nodes:
        node.kill()
    with pytest.raises(AWAY, match="fewer than a majority of its nodes answer"):
        ControlStore(cluster.address, "other", 1.0)
    await_(lambda: lines == [1, "lost"], "the loss is told")
    for node in nodes:
        node.start()
    await_(lambda: lines == [1, "lost", "back"], "the return is told")
    patient(lambda: watcher.announce(served, signals.EpochAborted(2, "broken", by=0), by="once"), patience_s=DEADLINE_S)
    await_(lambda: lines[-1] == 2, "the log goes on where it was")
    assert lines == [1, "lost", "back", 2], "each change is told once"
    listening.stop()


def test_the_loss_of_all_nodes_is_reported_at_once(cluster, served):
    cluster.stop()
    with pytest.raises(StoreError, match="is gone .* no node of it listens"):
        served.get("key")


def test_a_process_group_is_built_while_a_node_is_frozen(cluster, served):
    cluster.leader().freeze()

    def reduce(rank: int) -> list[float]:
        rendezvous = dist.PrefixStore("inner", served.clone().rendezvous("outer/1/0"))
        group = dist.ProcessGroupGloo(rendezvous, rank, 2, timedelta(seconds=DEADLINE_S))
        summand = torch.ones(2)
        group.allreduce([summand]).wait()
        return summand.tolist()

    assert at_once(lambda: reduce(0), lambda: reduce(1)) == [[2.0, 2.0]] * 2


def test_many_keys_are_read_at_once_and_one_that_comes_late_is_waited_for(served):
    store = served.rendezvous("pg")
    names = [f"key {number}" for number in range(250)]
    for number, name in enumerate(names[:-1]):
        store.set(name, str(number))
    late = threading.Timer(0.2, lambda: store.set(names[-1], "249"))
    late.start()
    assert store.multi_get(names) == [str(number).encode() for number in range(250)]
    late.join()


def test_an_addition_through_a_lost_node_is_counted_once(cluster, served):
    store = served.rendezvous("pg")
    node = cluster.leader()
    added = []

    def add() -> None:
        added.extend(store.add("n", 1) for _ in range(200))

    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    node.kill()
    adding.join(DEADLINE_S)
    assert not adding.is_alive()
    assert added == list(range(1, 201))


def test_a_run_outlives_the_leader_then_another_node_and_a_group_after_each(cluster, tmp_path, data_dir, reference):
    """No step is lost or repeated, although the nodes that decide change under the run."""
    first, second = Breakpoint(1, 3, "reduce", 1), Breakpoint(2, 5, "reduce", 1)
    run = support.start(tmp_path / "run", data_dir, [first, second], store=cluster.address)
    support.wait_for_step(run, 0)
    lost = cluster.leader()
    lost.kill()
    run.strike(first)
    support.wait_for(lambda: run.events("recovery"), run)
    lost.start()
    await_(lambda: all(node.follows() for node in cluster.nodes), "the node is back")
    # The leader by now, unless that is the first one again: nodes that had no processor for half a second elect another.
    others = [node for node in cluster.nodes if node is not lost]
    another = next((node for node in others if node.leads()), others[0])
    another.kill()
    run.strike(second)
    run.check(reference)
    assert [sorted(view["lost"]) for view in run.events("view")] == [[], ["1"], ["2"]]
    assert [line["step"] for line in run.events("recovery")] == [3, 5]
    assert [line["group"] for line in run.events("survivor")] == [0, 3]
    assert not run.events("store") and not (run.directory / STORE).exists(), "there is no other store"
    left = ControlStore(cluster.address, json.loads((run.directory / "config.json").read_text())["run_id"], SILENCE_S)
    assert left.listed() == [] and left.memory is None, "the run has left nothing in a store that outlives it"
