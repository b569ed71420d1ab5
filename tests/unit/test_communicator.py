"""The outer communicator between threads: sums, and above all how everybody is unblocked."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from megatron_ft.runtime import communicator as communicator_module
from megatron_ft.runtime import transfer, wire
from megatron_ft.runtime.communicator import Broken, Communicator, Left, Over, Work


def build(members: int, prefix: str = "p") -> list[Communicator]:
    """Communicators of all members, built together in threads of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(members) as pool:
        futures = [
            pool.submit(Communicator, dist.PrefixStore(prefix, store), me, range(members), 0, 60.0)
            for me in range(members)
        ]
        return [future.result() for future in futures]


def test_a_single_member_needs_nobody():
    outer = Communicator(None, 3, [3], 0, 60.0)
    tensor = torch.ones(4)
    outer.all_reduce(tensor).wait()
    assert tensor.tolist() == [1.0] * 4


def test_sums_over_the_members():
    outers = build(3)
    tensors = [torch.full((5,), float(me + 1)) for me in range(3)]
    for work in [outer.all_reduce(tensor) for outer, tensor in zip(outers, tensors, strict=True)]:
        work.wait()
    assert all(tensor.tolist() == [6.0] * 5 for tensor in tensors)


def test_an_abort_unblocks_whoever_waits():
    """One member never arrives. The others abort, as their watchers make them: all waits end, whatever gloo forgets."""
    outers = build(4)
    works = [outers[me].all_reduce(torch.ones(1000)) for me in range(3)]
    failed = []

    def wait(work):
        with pytest.raises(Broken):
            work.wait()
        failed.append(work)

    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for outer in outers[:3]:
        outer.abort()
    for thread in threads:
        thread.join(timeout=30)
    assert len(failed) == 3


@pytest.mark.parametrize("late", [False, True], ids=["started before", "with more started while it aborts"])
def test_an_abort_ends_everything_that_is_pending_at_all_survivors(late):
    """Many operations at once, of both kinds; the fourth member is silent. Nothing is left, and everything closes."""
    outers = build(4)
    survivors = outers[:3]
    works = [outer.all_reduce(torch.ones(100_000)) for _ in range(8) for outer in survivors]
    works += [outer.receive(torch.ones(10), 3, 7) for outer in survivors]
    gate = threading.Barrier(3)

    def abort(outer):
        gate.wait()
        outer.abort()
        if late:
            with pytest.raises(Broken):
                outer.all_reduce(torch.ones(1))

    def ends(work):
        with pytest.raises(Broken):
            work.wait()
        return True

    with ThreadPoolExecutor(len(works) + 3) as pool:
        endings = [pool.submit(ends, work) for work in works]
        list(pool.map(abort, survivors))
        assert all(ending.result(timeout=30) for ending in endings)
    for outer in outers:
        outer.close()
    communicator_module.sweep()
    assert not communicator_module._closed


def test_a_close_does_not_wait_for_operations_of_communicators_before_it(monkeypatch):
    class Never:
        def settled(self):
            return False

    stuck = (None, [Never()])
    monkeypatch.setattr(communicator_module, "_closed", [stuck])
    monkeypatch.setattr(communicator_module.time, "sleep", lambda _: pytest.fail("it waited"))
    Communicator(None, 0, [0], 0, 60.0).close()
    communicator_module.sweep()
    assert communicator_module._closed == [stuck]


def test_an_operation_that_never_ends_is_abandoned_after_an_abort():
    """What gloo does with a half received payload when the connection breaks: neither success nor failure."""

    class Forgotten:
        def wait(self, timeout):
            raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return False

    over = Over()
    work = Work(Forgotten(), over)
    threading.Timer(0.05, lambda: setattr(over, "aborted", True)).start()
    with pytest.raises(Broken, match="abandoned"):
        work.wait()
    assert not work.settled()


def test_an_operation_that_ends_right_after_its_wait_timed_out_has_succeeded():
    """Seen once in a failure-free run: the slice's timeout was taken for the end of the operation."""

    class EndsMeanwhile:
        completed = False

        def wait(self, timeout):
            if not self.completed:
                self.completed = True
                raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return self.completed

    Work(EndsMeanwhile(), Over()).wait()


def test_an_operation_that_fails_says_why():
    class Fails:
        def wait(self, timeout):
            raise RuntimeError("Connection reset by peer\nmore")

        def is_completed(self):
            return True

    with pytest.raises(Broken, match="^Connection reset by peer$"):
        Work(Fails(), Over()).wait()


def test_a_slow_receive_is_waited_for():
    """Longer than the grace period after an abort: patience with a healthy peer is not limited by it."""
    source, target = build(2)
    tensor = torch.zeros(3)
    receiving = target.receive(tensor, 0, 5)
    threading.Timer(0.5, lambda: source.send(torch.ones(3), 1, 5)).start()
    receiving.wait()
    assert tensor.tolist() == [1.0] * 3


def test_a_receive_from_a_silent_peer_ends_with_an_abort():
    outers = build(2)
    receiving = outers[1].receive(torch.zeros(3), 0, 5)
    threading.Timer(0.2, outers[1].abort).start()
    with pytest.raises(Broken):
        receiving.wait()


def test_closing_gives_everything_back():
    for outer in build(3):
        outer.close()
    communicator_module.sweep()
    assert not communicator_module._closed


def test_who_leaves_waits_no_more_and_cuts_nothing_that_is_on_its_way():
    """Members 0 and 1 have all of a step, and begin the next one; member 2 still takes the last part of that step."""
    outers = build(3)
    steps = [[torch.full((500_000,), float(me + 1)) for _ in range(3)] for me in range(3)]
    works = [[outer.all_reduce(tensor) for tensor in tensors] for outer, tensors in zip(outers, steps, strict=True)]
    for work in works[0] + works[1]:
        work.wait()
    following = [outers[me].all_reduce(torch.ones(500_000)) for me in (0, 1)]
    threading.Timer(0.05, outers[1].leave).start()
    outers[0].leave()
    for me, work in enumerate(following):
        with pytest.raises(Left):
            work.wait()
        with pytest.raises(Left):
            outers[me].all_reduce(torch.ones(1))
    for work, tensor in zip(works[2], steps[2], strict=True):
        work.wait()
        assert tensor.unique().tolist() == [6.0]
    assert not outers[2]._over.aborted and not following[0].settled()
    for outer in outers:
        outer.close()
    assert following[0].settles_within(60.0), "closing ends what was left"


def test_who_leaves_waits_for_no_receive():
    outers = build(2)
    receiving = outers[1].receive(torch.zeros(3), 0, 5)
    outers[1].leave()
    with pytest.raises(Left):
        receiving.wait()


def test_nothing_starts_after_an_abort():
    outers = build(2)
    outers[0].abort()
    with pytest.raises(Broken):
        outers[0].all_reduce(torch.ones(1))
    outers[0].abort()  # any number of times


def test_a_new_communicator_works_after_the_old_was_aborted():
    for outer in build(2, "old"):
        outer.abort()
    outers = build(2, "new")
    tensors = [torch.ones(3) for _ in outers]
    for work in [outer.all_reduce(tensor) for outer, tensor in zip(outers, tensors, strict=True)]:
        work.wait()
    assert tensors[0].tolist() == [2.0] * 3


def test_an_abort_leaves_other_sockets_of_the_process_alone():
    import socket

    left, right = socket.socketpair()
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    served, _ = server.accept()
    for outer in build(2):
        outer.abort()
    left.sendall(b"a"), client.sendall(b"b")
    assert (right.recv(1), served.recv(1)) == (b"a", b"b")
    for each in (left, right, server, client, served):
        each.close()


def test_a_state_travels_whole():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "none": None, "empty": torch.empty(0)}
    source, target = build(2)
    sender = threading.Thread(target=transfer.send_state, args=(source, state, 1))
    sender.start()
    received = transfer.receive_state(target, 0)
    sender.join()
    assert torch.equal(received["model"]["weight"], model.weight)
    assert received["none"] is None and received["empty"].shape == (0,)
    twin = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    twin.load_state_dict(received["optimizer"])
    assert torch.equal(twin.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_what_cannot_travel_is_named():
    from megatron_ft.errors import EngineError

    with pytest.raises(EngineError, match=r"state\.optimizer\.hook is a function"):
        transfer.flatten({"optimizer": {"hook": len.__class__ and (lambda: None)}})


def test_an_abort_cuts_no_connection_that_others_made_while_it_was_built(tmp_path):
    """Who follows this rank calls after a loss, when the next communicator is being built, too."""
    store = dist.HashStore()
    listener = socket.create_server(("127.0.0.1", 0))
    ours = wire.listen("127.0.0.1")
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "loader"))
    unix.listen()
    with ThreadPoolExecutor(2) as pool, ExitStack() as ends:
        first = pool.submit(Communicator, dist.PrefixStore("p", store), 0, range(2), 0, 60.0)
        while not store.num_keys():  # it looks for the other one
            assert not first.done()
        caller = subprocess.Popen(CALLER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ends.callback(caller.kill)
        caller.stdin.write(f"{listener.getsockname()[1]} {tmp_path / 'loader'}\n")
        caller.stdin.flush()
        accepted = [ends.enter_context(end.accept()[0]) for end in (listener, unix)]
        called = ends.enter_context(wire.call("127.0.0.1", ours.getsockname()[1], "run", {}))
        accepted.append(ends.enter_context(ours.accept()[0]))
        outers = [Communicator(dist.PrefixStore("p", store), 1, range(2), 0, 60.0), first.result()]
        for outer in outers:
            outer.abort()
        caller.stdin.write("say\n")
        caller.stdin.flush()
        assert [end.recv(5, socket.MSG_WAITALL) for end in accepted[:2]] == [b"hello", b"hello"]
        called.sendall(b"hello")
        assert wire.hear(accepted[2])["token"] and accepted[2].recv(5, socket.MSG_WAITALL) == b"hello"
        for outer in outers:
            with pytest.raises(Broken):
                outer.all_reduce(torch.ones(1)).wait()
    for end in (listener, ours, unix):
        end.close()


CALLER = [
    sys.executable,
    "-c",
    """
import socket
port, path = input().split()
tcp, unix = socket.create_connection(("127.0.0.1", int(port))), socket.socket(socket.AF_UNIX)
unix.connect(path)
input()
for end in (tcp, unix):
    end.sendall(b"hello")
input()
""",
]
"""Another process; the ends that this one accepts are another thread's."""
