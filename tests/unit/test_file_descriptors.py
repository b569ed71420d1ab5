"""Processes with thousands of descriptors: every wait of the package works there, and the limit allows them."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from megatron_ft.host.heartbeat import HeartbeatService
from megatron_ft.run.collectives import p2p_channel
from megatron_ft.utils import file_descriptors
from megatron_ft.utils.auth.secret import Secret
from megatron_ft.utils.signal_wakeup import Wakeup
from tests.stores import await_

MANY = 3000


@pytest.fixture
def crowded():
    """Give this process 3,000 more descriptors, so that the next ones are far above 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    file_descriptors.raise_descriptors()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_agent_hears_signals(crowded):
    wakeup = Wakeup((signal.SIGUSR1,))
    try:
        assert wakeup._read > 1024 and wakeup.wait(0.0) == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wakeup.wait(60.0) == [signal.SIGUSR1]
    finally:
        wakeup.close()


def test_agents_hear_each_other(crowded):
    key = Secret.new()
    both = [HeartbeatService("127.0.0.1", rank, key, 60.0) for rank in range(2)]
    try:
        for rank, heartbeats in enumerate(both):
            heartbeats.add({1 - rank: ("127.0.0.1", both[1 - rank].port)})
        await_(
            lambda: all(heartbeats._others[1 - rank].heartbeats > 2 for rank, heartbeats in enumerate(both)),
            "heartbeats arrive at both",
        )
    finally:
        for heartbeats in both:
            heartbeats.close()


def test_ranks_of_a_group_hear_each_other(crowded):
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        pair = p2p_channel.P2PChannels({1: one}), p2p_channel.P2PChannels({0: other})
        assert one.fileno() > 1024 and pair[1].heard(0) is None
        pair[0].send_words(1, [7])
        assert pair[1].heard(0)[0] == 7


def test_a_wait_for_the_end_of_a_connection_is_told_of_it(crowded):
    """A donor's thread waits like this for the connection of the rank that follows."""
    one, other = socket.socketpair()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(file_descriptors.readable(one, None)))
    thread.start()
    other.close()
    thread.join(60.0)
    assert seen == [True]
    one.close()


def test_a_command_raises_its_soft_limit_to_the_hard_one():
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1]))); "
        "import contextlib; from megatron_ft import cli\n"
        "with contextlib.suppress(SystemExit): cli.main(['report', '/nowhere'])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code, "4000"], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "(4000, 4000)", done


def test_an_unlimited_hard_limit_is_not_taken_literally(monkeypatch):
    asked = []
    fake = SimpleNamespace(
        RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda _: (1024, -1), setrlimit=lambda _, pair: asked.append(pair)
    )
    monkeypatch.setattr(file_descriptors, "resource", fake)
    file_descriptors.raise_descriptors()
    assert asked == [(2**20, -1)]
