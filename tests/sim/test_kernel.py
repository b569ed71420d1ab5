"""The kernel: order of events, and threads that wait for futures."""

import random

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.proof.kernel import Future, Kernel, Thread
from megatron_ft.proof.network import LATE_SHARE, Network


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1)), max_size=30))
def test_calls_are_made_in_the_order_of_time_priority_and_id(planned):
    kernel, made = Kernel(), []
    for number, (time, priority) in enumerate(planned):
        kernel.at(time, lambda number=number: made.append(number), priority)
    assert not kernel.run(99.0, lambda: False)
    assert made == sorted(range(len(planned)), key=lambda number: (*planned[number], number))


def test_a_run_ends_when_it_is_done_and_at_its_limit():
    kernel, made = Kernel(), []
    for time in (1.0, 2.0, 3.0):
        kernel.at(time, lambda time=time: made.append(time))
    assert kernel.run(9.0, lambda: len(made) == 1) and kernel.now == 1.0
    assert not kernel.run(2.5, lambda: False) and made == [1.0, 2.0]


def test_a_future_keeps_its_first_value():
    future, seen = Future(), []
    future.then(seen.append)
    future.resolve(1)
    future.resolve(2)
    future.then(seen.append)
    assert seen == [1, 1]


def test_a_suspended_thread_loses_nothing_and_a_stopped_one_never_goes_on():
    future, later, seen = Future(), Future(), []

    async def body():
        seen.append(await future)
        seen.append(await later)

    thread = Thread(body())
    thread.start()
    thread.suspend()
    future.resolve("kept")
    assert seen == []
    thread.resume()
    assert seen == ["kept"]
    thread.stop()
    later.resolve("never")
    assert seen == ["kept"]


def network(seed=0, **times):
    kernel = Kernel()
    return kernel, Network(kernel, random.Random(seed), **times)


def test_a_cut_link_loses_messages_in_one_direction_until_it_heals():
    kernel, links = network()
    links.cut([1], [2], until=5.0)
    assert not links.send(1, 2, lambda: None) and links.send(2, 1, lambda: None)
    kernel.at(6.0, lambda: None)
    kernel.run(9.0, lambda: False)
    assert links.send(1, 2, lambda: None)


def test_messages_overtake_each_other_and_some_are_late():
    kernel, links = network(fastest=1.0, slowest=2.0)
    arrived = []
    for number in range(400):
        links.send(1, 2, lambda number=number: arrived.append((kernel.now, number)))
    kernel.run(99.0, lambda: False)
    assert [number for _, number in arrived] != sorted(number for _, number in arrived)
    late = sum(time > 2.0 for time, _ in arrived)
    assert 0.5 * LATE_SHARE < late / 400 < 2 * LATE_SHARE


def test_a_slow_host_is_slow_in_both_directions():
    kernel, links = network(fastest=1.0, slowest=1.0)
    links.slow(1, 100.0, until=5.0)
    arrived = {}
    for source, target in ((1, 2), (2, 1), (2, 3)):
        links.send(source, target, lambda link=(source, target): arrived.setdefault(link, kernel.now))
    kernel.run(9999.0, lambda: False)
    assert arrived[1, 2] >= 100 and arrived[2, 1] >= 100 and arrived[2, 3] <= 10


def test_a_lossy_network_loses_about_its_share():
    _, links = network()
    links.lose(0.3, until=1.0)
    lost = sum(not links.send(1, 2, lambda: None) for _ in range(1000))
    assert 230 < lost < 370
