"""A run that finds no control store for its patience ends with exit code 7, and its launcher starts it again from the
newest checkpoint."""

from __future__ import annotations

import pytest

from megatron_ft.cluster.faults import kill as inject
from megatron_ft.errors import WIPED_OUT
from megatron_ft.record import history, invariants
from tests import support
from tests.stores import EtcdNode, await_, etcd_missing, held_port

GROUPS, STEPS = 2, 20

pytestmark = pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())


@pytest.fixture
def etcd(tmp_path):
    """An etcd of one node, which no run has started."""
    held = [held_port() for _ in range(2)]
    client, peer = (one.getsockname()[1] for one in held)
    node = EtcdNode("n0", tmp_path, client, f"n0=http://127.0.0.1:{peer}")
    node.start()
    await_(node.leads, "etcd answers")
    yield node
    node.kill()
    for one in held:
        one.close()


@pytest.mark.long
def test_a_run_that_misses_its_given_etcd_is_started_again_when_the_etcd_is_back(etcd, tmp_path, data_dir):
    """A rank is lost while there is no etcd. The launcher's new start waits for the etcd."""
    alone = support.start(tmp_path / "alone", data_dir, groups=GROUPS, steps=STEPS)
    alone.check()
    gate = support.Gate(tmp_path, slowly=STEPS)
    options = {"groups": GROUPS, "steps": STEPS, "script": gate.script, "rejoin": {"enabled": True}}
    saves = {"directory": str(tmp_path / "saved"), "period_s": 0.05}
    store = f"etcd://127.0.0.1:{etcd.port}"
    run = support.start(tmp_path / "run", data_dir, store=store, store_patience_s=2.0, checkpoint=saves, **options)
    support.wait_for(lambda: run.events("checkpoint"), run)
    etcd.kill()
    support.kill([inject.pid_of(run.directory, 1)])
    support.wait_for(lambda: any((run.directory / "earlier").glob("*")), run)
    etcd.start()
    gate.open()
    said = " ".join(run.finish().split())
    assert run.process.returncode == 0 and "the whole job is started again" in said, f"{said}\n{run.logs()}"
    first = history.read(run.directory / "earlier" / "0001")
    (stop,) = (line for line in first if line["event"] == "stop")
    missing = (
        f"no control store has answered for 2 s, and the interrupted step needs one: control store {store} is gone"
    )
    assert stop["exit_code"] == WIPED_OUT and missing in stop["reason"]
    saved = max(line["step"] for line in first if line["event"] == "checkpoint")
    assert run.events("resume")[0]["step"] >= saved
    both = invariants.joined([first, run.history])
    assert not invariants.check_history(both, GROUPS * support.PER_GROUP, alone.history)
    assert [line["step"] for line in both if line["event"] == "step"] == list(range(STEPS))
