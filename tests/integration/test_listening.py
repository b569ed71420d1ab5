"""A run on one host can be reached from that host only: no process of it listens on another address than loopback."""

from __future__ import annotations

from tests import listening, support

GROUPS, RANKS = 2, 2

WORLD = """
import megatron_ft
init = megatron_ft.init

def init_with_a_world(*arguments, **options):
    session = init(*arguments, **options)
    session.init_distributed()
    return session

megatron_ft.init = init_with_a_world
"""
"""The script uses torch.distributed inside its group, too, as DeepSpeed does."""


def test_every_listening_socket_of_a_run_on_one_host_is_bound_to_loopback(tmp_path, data_dir):
    (tmp_path / "world").mkdir()
    script = support.changed_script(tmp_path / "world" / "train.py", WORLD)
    gate = support.Gate(tmp_path, 2, script=script)
    checkpoint = {"directory": str(tmp_path / "checkpoints"), "memory_gb": 0.1}
    run = support.start(
        tmp_path / "run",
        data_dir,
        steps=4,
        groups=GROUPS,
        extra=["--ranks-per-group", RANKS],
        script=gate.script,
        rejoin={"enabled": True},
        checkpoint=checkpoint,
    )
    try:
        support.wait_for(lambda: gate.waiting(2) == GROUPS * RANKS, run)
        found = listening.of_tree(run.process.pid)
    finally:
        gate.open()
        output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    # The store, the outer communicator and the donor of each rank, the world's store and gloo of each group, the copies.
    assert len({listener.port for listener in found}) >= 1 + 2 * GROUPS * RANKS + GROUPS + 1, found
    assert {listener.address for listener in found} == {"127.0.0.1"}, found
