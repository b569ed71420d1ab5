"""torch.distributed inside one group, between two real processes: a cut ends the other rank's waiting, and nothing else."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
from pathlib import Path

from megatron_ft.run import store
from megatron_ft.utils.auth import secret
from tests import support

RUN, RANKS, TIMEOUT_S = "a run", 2, 60.0


def test_a_cut_ends_the_operations_of_all_process_groups_and_no_connection_of_the_user():
    """The script's PipelineModule makes a process group of its own, while the script opens a connection."""
    server, port = store.host("127.0.0.1", 0)
    control = store.ControlStore(("127.0.0.1", port), RUN, TIMEOUT_S)
    control.begin()
    with socket.create_server(("127.0.0.1", 0)) as users, contextlib.ExitStack() as ends:
        users.settimeout(TIMEOUT_S)
        ranks = [start(me, port, users.getsockname()[1]) for me in range(RANKS)]
        try:
            said = set()
            for end in [ends.enter_context(users.accept()[0]) for _ in ranks]:
                end.settimeout(TIMEOUT_S)
                said.add(end.recv(len("rank 0 after the cut: 2"), socket.MSG_WAITALL))
                end.sendall(b"and back")
            assert said == {b"rank 0 after the cut: 2", b"rank 1 after the cut: 0"}
        finally:
            output = "\n".join(rank.communicate()[0] for rank in ranks)  # they end by themselves
            print(output)
    assert [rank.returncode for rank in ranks] == [0] * RANKS, output
    del server


def start(me: int, port: int, users: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_world", str(me), str(port), str(users)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=support.ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", secret.VARIABLE: support.SECRET.text},
    )


def rank(me: int, port: int, users: int) -> None:
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    import torch
    import torch.distributed as dist

    from megatron_ft.config.rank_env import RankEnvironment
    from megatron_ft.config.schema import RunConfig
    from megatron_ft.run.collectives.group_world import World
    from megatron_ft.run.collectives.intra_group import IntraGroup
    from megatron_ft.run.store.client import CoordinationClient

    control = store.ControlStore(("127.0.0.1", port), RUN, TIMEOUT_S)
    config = RunConfig(groups=1, ranks_per_group=RANKS)
    env = RankEnvironment(RUN, 0, me, f"127.0.0.1:{port}", "127.0.0.1", Path(), config)
    inner = IntraGroup.build(env, CoordinationClient(control, 0, TIMEOUT_S), lambda: False)
    world = World.join(env, inner, "gloo")
    with world.made_here():
        own = dist.new_group([0, 1])
        user = socket.create_connection(("127.0.0.1", users))
    user.settimeout(TIMEOUT_S)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=own)
    if me == 1:
        control.wait("rank 0 begins to wait", TIMEOUT_S)
        world.cut()
    broken = 0
    # Rank 1 starts no operation: gloo would forget one that it cannot write any more.
    for group in (None, own) if me == 0 else ():
        control.set("rank 0 begins to wait", True)
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
            continue
        broken += 1
    user.sendall(f"rank {me} after the cut: {broken}".encode())
    assert user.recv(8, socket.MSG_WAITALL) == b"and back"
    assert control.get("anything") is None, "the control store is reached as before"
    os._exit(0)


if __name__ == "__main__":
    rank(*map(int, sys.argv[1:]))
