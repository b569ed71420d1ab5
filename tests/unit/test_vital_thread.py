"""Threads whose unexpected end ends their rank, and what becomes of others that a bug ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.host.heartbeat import HeartbeatService
from megatron_ft.run.collectives.base import Broken, Over
from megatron_ft.run.collectives.gloo_communicator import PointToPoint
from megatron_ft.run.store import garbage_collection, watcher
from megatron_ft.utils import vital_thread
from tests import support
from tests.stores import await_

SCRIPT = """
from megatron_ft.errors import StoreError
from megatron_ft.utils.vital_thread import VitalThread

def take(entry):
    raise {error}

thread = VitalThread(take, "megatron_ft-ear", ("entry",))
thread.start()
thread.join()
print("it goes on")
"""


def run(error: str, path=None) -> subprocess.CompletedProcess:
    own = {} if path is None else {vital_thread.ERROR_VARIABLE: str(path)}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
    )


def test_an_exception_in_a_vital_thread_ends_its_rank_with_its_name_and_place(tmp_path):
    done = run('KeyError("group")', tmp_path / "error")
    assert done.returncode == 1 and "Traceback" in done.stderr and not done.stdout
    said = json.loads((tmp_path / "error").read_text())
    assert said == {
        "message": "thread megatron_ft-ear raised KeyError: 'group' (<string>, line 6, in take)",
        "microbatch": None,
    }


def test_an_error_of_the_user_in_a_vital_thread_keeps_its_exit_code(tmp_path):
    done = run('StoreError("no store")', tmp_path / "error")
    assert done.returncode == 4 and done.stderr == "megatron_ft: no store\n"
    assert json.loads((tmp_path / "error").read_text())["message"] == "no store"


def test_in_a_process_that_is_no_rank_the_traceback_is_printed():
    done = run('KeyError("group")')
    assert done.stdout == "it goes on\n" and "KeyError: 'group'" in done.stderr


def test_a_watcher_reports_an_exception_of_what_it_calls():
    failed, over = [], threading.Event()

    def hears(verdict: signals.Verdict) -> None:
        raise ZeroDivisionError(verdict)

    entries = SimpleNamespace(memory="a", entry=lambda *_: signals.to_json(signals.RunFinished()), floor=None, get=None)
    ear = watcher.Watcher(entries, hears, print, failed=lambda error: (failed.append(error), over.set()))
    ear._index = 1
    ear.start()
    assert over.wait(support.TIMEOUT_S)
    assert [type(error) for error in failed] == [ZeroDivisionError]


def test_an_agent_does_not_go_on_without_its_beats(monkeypatch):
    def fails(self: HeartbeatService) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(HeartbeatService, "_send", fails)
    heartbeats = HeartbeatService("127.0.0.1", 0, support.SECRET.of("heartbeats", "run"), 1.0)
    heartbeats.add({1: ("127.0.0.1", 9)})
    await_(lambda: not heartbeats._thread.is_alive(), "its thread has ended")
    with pytest.raises(ZeroDivisionError, match="of a test"):
        heartbeats.changes()
    heartbeats.close()


def test_a_send_that_fails_in_any_way_is_not_done():
    def wait(timeout) -> None:
        raise MemoryError("of a test")

    with pytest.raises(Broken):
        PointToPoint(SimpleNamespace(wait=wait), Over(), timeout_s=60.0).wait()


def test_a_garbage_collector_goes_on_after_a_bug_in_one_collection(monkeypatch, caplog):
    collections: list[int] = []

    def collect(self: garbage_collection.GarbageCollector) -> None:
        collections.append(1)
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(garbage_collection, "_AGAIN_S", 0.01)
    monkeypatch.setattr(garbage_collection.GarbageCollector, "collect", collect)
    collector = garbage_collection.GarbageCollector(
        SimpleNamespace(memory="a", cut=lambda: None), lambda group: True, first_view(2)
    )
    collector.start()
    collector.on_signal(signals.ViewAgreed(1))
    await_(lambda: len(collections) > 1, "it collects again")
    collector.stop()
    assert (
        "a garbage collection of the control store raised ZeroDivisionError: of a test (test_vital_thread.py"
        in caplog.text
    )
