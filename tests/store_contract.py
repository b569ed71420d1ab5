"""The contract of every control store, whichever implementation is behind it. Subclass it with a fixture ``served``."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.messages import EpochAborted
from megatron_ft.run.store import ControlStore, StoreConflict, StoreLostMemory, watcher
from megatron_ft.types import Exit
from tests.stores import DEADLINE_S, await_

SLOW_IS_FINE = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def at_once(*calls: Callable[[], object]) -> list:
    """Make all calls in threads that begin together; return their results in order."""
    together = threading.Barrier(len(calls))

    def begin(call: Callable[[], object]) -> object:
        together.wait(DEADLINE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begin, calls))


class StoreContract:
    """``served`` is a fresh run's ControlStore."""

    def test_the_first_writer_wins(self, served: ControlStore):
        assert served.create("view/1", {"by": 0}) == {"by": 0}
        assert served.create("view/1", {"by": 1}) == {"by": 0}
        assert served.get("view/1") == {"by": 0}
        assert served.get("view/2") is None

    @given(clients=st.integers(2, 5), keys=st.integers(1, 4), equal=st.booleans())
    @settings(max_examples=15, **SLOW_IS_FINE)
    def test_of_writers_that_create_at_once_exactly_one_wins(self, served: ControlStore, clients, keys, equal):
        """Also when all of them write the same value: the winner is identified by its id."""
        game = uuid.uuid4().hex

        def play(player: int) -> list[tuple[object, bool]]:
            client = served.clone()
            try:
                return [client.claim(f"{game}/{key}", 0 if equal else player) for key in range(keys)]
            finally:
                client.close()

        games = at_once(*[lambda player=player: play(player) for player in range(clients)])
        for moves in zip(*games, strict=True):
            assert sum(won for _, won in moves) == 1
            (winner,) = (player for player, (_, won) in enumerate(moves) if won)
            assert {standing for standing, _ in moves} == {0 if equal else winner}

    def test_a_writer_that_retries_a_create_recognises_its_own(self, served: ControlStore):
        assert served.claim("view/1", 5, by="a") == (5, True)
        assert served.claim("view/1", 5, by="a") == (5, True)
        assert served.claim("view/1", 5, by="b") == (5, False)

    def test_an_entry_that_is_retried_is_there_once(self, served: ControlStore):
        """The first attempt took effect although its caller got no answer."""
        served.append("log", "x")
        served.claim("log/1", "mine", by="a")
        assert served.append("log", "mine", by="a") == 1
        assert served.append("log", "next") == 2

    def test_an_entry_that_several_append_under_one_name_at_once_is_there_once(self, served: ControlStore):
        """A collective breaks in many groups at the same moment. Each has a memory of its own: none has read the entry
        of another before it begins."""
        groups = [ControlStore(served.address, served.run_id, served.timeout_s) for _ in range(4)]
        served.append("log", "before")
        assert at_once(*[lambda one=one: one.append("log", "broken", by="reset 3") for one in groups]) == [1] * 4
        assert served.append("log", "after") == 2

    def test_an_entry_is_not_looked_for_among_those_that_were_read(self, served: ControlStore):
        """The log of a run of weeks has thousands of entries."""
        other = served.clone()
        for number in range(3):
            other.append("log", number)
        listening = served.clone()
        assert [listening.entry("log", number, DEADLINE_S) for number in range(3)] == [0, 1, 2]
        asked = []
        served.claim = lambda key, value, by=None: asked.append(key) or (value, True)
        assert served.append("log", "next") == 3 and asked == ["log/3"]

    @given(said=st.lists(st.tuples(st.sampled_from("abc"), st.text() | st.integers() | st.none())))
    @settings(max_examples=20, **SLOW_IS_FINE)
    def test_a_collection_is_read_as_a_whole(self, served: ControlStore, said):
        """The last value of each member is returned; collections whose names begin alike stay apart."""
        name = uuid.uuid4().hex
        assert served.members(name) == {}
        for member, value in said:
            served.add(name, member, value)
            served.add(f"{name}1", member, "another")
        assert served.members(name) == dict(said)
        assert served.members(name, {"a"}) == {member: value for member, value in dict(said).items() if member == "a"}

    def test_two_runs_do_not_meet(self, served: ControlStore):
        other = ControlStore(served.address, "other", served.timeout_s)
        served.set("key", 1)
        assert other.get("key") is None

    def test_waiting_ends_with_the_value_or_the_timeout(self, served: ControlStore):
        assert served.wait("late", 0.05) is None
        assert served.wait("late", 0.0) is None
        waiting, writing = served.clone(), served.clone()
        assert at_once(lambda: waiting.wait("late", DEADLINE_S), lambda: writing.set("late", [7])) == [[7], None]

    def test_a_log_has_no_holes_whoever_appends(self, served: ControlStore):
        def write(client: ControlStore, writer: int) -> list[int]:
            return [client.append("log", [writer, number]) for number in range(5)]

        indices = at_once(*[lambda writer=writer: write(served.clone(), writer) for writer in range(4)])
        assert sorted(sum(indices, [])) == list(range(20))
        entries = [served.entry("log", index, DEADLINE_S) for index in range(20)]
        assert sorted(entries) == [[writer, number] for writer in range(4) for number in range(5)]
        assert served.entry("log", 20, 0.01) is None

    def test_equal_entries_are_both_kept(self, served: ControlStore):
        assert (served.append("log", "same"), served.append("log", "same")) == (0, 1)

    def test_a_process_group_is_built_through_it(self, served: ControlStore):
        def reduce(rank: int) -> list[float]:
            rendezvous = dist.PrefixStore("inner", served.clone().rendezvous("outer/1/0"))
            group = dist.ProcessGroupGloo(rendezvous, rank, 2, timedelta(seconds=DEADLINE_S))
            summand = torch.full((3,), float(rank + 1))
            group.allreduce([summand]).wait()
            return summand.tolist()

        assert at_once(lambda: reduce(0), lambda: reduce(1)) == [[3.0] * 3] * 2

    def test_the_rendezvous_is_a_torch_store(self, served: ControlStore):
        torch_store = served.rendezvous("pg")
        torch_store.set("a", b"\x00\xff")
        assert torch_store.get("a") == b"\x00\xff"
        assert (torch_store.add("n", 3), torch_store.add("n", -1)) == (3, 2)
        assert torch_store.check(["a", "n"]) and not torch_store.check(["a", "absent"])
        assert torch_store.compare_set("c", "", "first") == b"first"
        assert torch_store.compare_set("c", "second", "third") == b"first"
        assert torch_store.compare_set("c", "first", "fourth") == b"fourth"
        assert torch_store.delete_key("c") and not torch_store.check(["c"])
        with pytest.raises(dist.DistStoreError, match="(?i)timeout"):
            torch_store.wait(["absent"], timedelta(milliseconds=50))
        other = served.clone().rendezvous("pg")
        assert at_once(lambda: torch_store.get("late"), lambda: other.set("late", "x"))[0] == b"x"

    def test_concurrent_additions_are_all_counted(self, served: ControlStore):
        stores = [served.clone().rendezvous("pg") for _ in range(4)]
        at_once(*[lambda store=store: [store.add("n", 1) for _ in range(10)] for store in stores])
        assert stores[0].add("n", 0) == 40

    def test_a_run_that_was_begun_is_known(self, served: ControlStore):
        other = ControlStore(served.address, "never begun", served.timeout_s)
        with pytest.raises(StoreLostMemory, match="knows no run never begun"):
            other.check_begun()
        served.begin()
        memory = served.memory
        served.begin()
        served.check_begun()
        assert memory is not None and served.memory == memory
        assert ControlStore(served.address, served.run_id, served.timeout_s).memory == memory

    def test_restoring_keeps_what_stands(self, served: ControlStore):
        served.begin()
        memory = served.memory
        served.restore(3, {"epoch": 3}, {"report/3/0": "mine"})
        assert (served.memory, served.get("view/3"), served.get("report/3/0")) == (memory, {"epoch": 3}, "mine")
        served.restore(3, {"epoch": 3})
        with pytest.raises(StoreConflict, match="another view of epoch 3"):
            served.restore(3, {"epoch": 3, "live": [1]})

    def test_a_notice_reaches_the_watcher_as_a_verdict(self, served: ControlStore):
        heard: list[signals.Verdict] = []
        listening = watcher.Watcher(served.clone(), heard.append, lambda error: None)
        listening.start()
        died = signals.RankExited(Exit(2, 0, 4242, "node7", "SIGKILL", None))
        watcher.announce(served, died, by="once")
        watcher.announce(served, signals.EpochAborted(3, "a connection broke", by=1))
        await_(lambda: len(heard) == 2, "both notices are heard")
        listening.stop()
        assert heard[0].group == 2 and "rank 0 on node7 (pid 4242) ended with SIGKILL" in heard[0].reason
        assert heard[1] == EpochAborted(3, "a connection broke", by=1)

    def test_a_key_that_is_deleted_while_it_is_read_is_there_or_not(self, served: ControlStore):
        """A late reader asks for a notice at the moment at which it is removed."""
        writer, reader, over = served.clone(), served.clone(), threading.Event()

        def write() -> None:
            for number in range(200):
                writer.set("notice/0", number)
                writer.delete(["notice/0"])
            over.set()

        def read() -> set:
            found = set()
            while not over.is_set():
                found |= {reader.get("notice/0"), reader.wait("notice/0", 0.001)}
            return found

        _, found = at_once(write, read)
        assert found <= {None, *range(200)} and served.get("notice/0") is None

    def test_a_value_is_swapped_only_for_the_one_that_stood(self, served: ControlStore):
        client = served._client
        assert client.swap("run/x", "old", "new") is None and client.get("run/x") is None
        assert client.swap("run/x", None, "first") == "first" and client.swap("run/x", None, "second") == "first"
        assert client.swap("run/x", "first", "third") == "third" and client.get("run/x") == "third"
        if hasattr(dist.TCPStore, "list_keys"):  # torch 2.9 has no such method
            assert "run/x" in client.keys("run/")
        assert client.keys("run/y") == []
