"""The call guard: whatever a connection does, the caller returns, and no thread or connection is left behind."""

from __future__ import annotations

import gc
import threading

import pytest

from megatron_ft.run.store.call_guard import Guard, Overdue
from tests.stores import DEADLINE_S, await_, store_threads


class Stuck:
    """A connection on which calls block until it is cut."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def block(self) -> str:
        self.released.wait(DEADLINE_S)
        return "too late"

    def cut(self) -> None:
        self.released.set()


def guard_of(made: list[Stuck], connecting_blocks: bool = False) -> Guard[Stuck]:
    def connect(announce):
        connection = Stuck()
        made.append(connection)
        announce(connection)
        if connecting_blocks:
            connection.block()
            raise OSError("cut")
        return connection

    return Guard(connect)


def test_a_blocked_call_is_given_up_with_its_connection_and_its_thread():
    before, made = len(store_threads()), []
    guard = guard_of(made)
    assert guard.call(lambda connection: "fine", DEADLINE_S) == "fine"
    with pytest.raises(Overdue):
        guard.call(Stuck.block, 0.02)
    assert made[0].released.is_set()
    assert guard.call(lambda connection: connection is made[1], DEADLINE_S)
    guard.drop()
    await_(lambda: len(store_threads()) <= before, "the threads end")


@pytest.mark.parametrize("bound_s", [0.0, -0.5])
def test_a_call_without_time_left_is_overdue(bound_s):
    guard = guard_of([])
    with pytest.raises(Overdue):
        guard.call(Stuck.block, bound_s)
    guard.drop()


def test_a_blocked_connect_is_given_up_too():
    before, made = len(store_threads()), []
    guard = guard_of(made, connecting_blocks=True)
    with pytest.raises(Overdue):
        guard.call(lambda connection: None, 0.02)
    await_(lambda: len(store_threads()) <= before, "the thread ends")


def test_exceptions_reach_the_caller_and_the_connection_is_kept():
    made: list[Stuck] = []
    guard = guard_of(made)
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda connection: 1 // 0, DEADLINE_S)
    assert guard.call(lambda connection: len(made), DEADLINE_S) == 1


def test_a_second_caller_does_not_wait_longer_than_its_own_bound():
    made: list[Stuck] = []
    guard = guard_of(made)
    began = threading.Event()

    def block(connection: Stuck) -> str:
        began.set()
        return connection.block()

    first = threading.Thread(target=lambda: guard.call(block, DEADLINE_S))
    first.start()
    assert began.wait(DEADLINE_S)
    with pytest.raises(Overdue):
        guard.call(lambda connection: None, 0.02)
    made[0].cut()
    first.join(DEADLINE_S)
    assert not first.is_alive()


def test_the_thread_ends_when_the_guard_is_unreferenced():
    before = len(store_threads())
    guard = guard_of([])
    guard.call(lambda connection: None, DEADLINE_S)
    del guard
    gc.collect()
    await_(lambda: len(store_threads()) <= before, "the thread ends")
