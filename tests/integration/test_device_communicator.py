"""Runs whose gradients go between groups, and inside them, as if by NCCL (``tests.fakes.nccl_over_gloo``)."""

from __future__ import annotations

import pytest

from megatron_ft.errors import StartOver
from megatron_ft.run.injection_points import Breakpoint
from tests import support

STEPS = 12
LIKE_NCCL = f"""
import os, sys
sys.path.insert(0, {str(support.ROOT)!r})
from megatron_ft.run.collectives import nccl_communicator
from megatron_ft.config.rank_env import RankEnvironment
from tests.fakes.nccl_over_gloo import install
nccl_communicator.ABORT_TIMEOUT_S = 0.5
"""
HEALTHY = LIKE_NCCL + "install()\n"
HANGS_IN_GROUP_2 = LIKE_NCCL + "env = RankEnvironment.from_env()\ninstall((env.group, env.incarnation) == (2, 0))\n"
HANGS_INSIDE_GROUP_1 = f"""
import os, sys, threading
sys.path.insert(0, {str(support.ROOT)!r})
import torch
from torch.distributed import distributed_c10d
from megatron_ft.run.collectives import user_process_groups
from megatron_ft.config.rank_env import RankEnvironment

class Tensors:
    group_name, group_desc, _device_types = "9", "tensor parallelism", ["cuda"]
    def _get_backend(self, device): return self
    def _set_default_timeout(self, timeout): pass
    def get_error(self): return torch._C._distributed_c10d.ErrorType.SUCCESS
    def abort(self): threading.Event().wait()

user_process_groups._ABORT_S = 0.5
env = RankEnvironment.from_env()
if (env.group, env.position, env.incarnation) == (1, 1, 0):
    group = Tensors()
    distributed_c10d._world.pg_map[group] = ("nccl", None)
    distributed_c10d._world.pg_group_ranks[group] = {{0: 0, 1: 1}}
"""
"""The process group of an engine, in a rank that outlives the other of its group."""


def start(directory, data_dir, change, holds=(), **options) -> support.Run:
    script = support.changed_script(directory.with_suffix(".py"), change)
    return support.start(
        directory,
        data_dir,
        holds,
        script=script,
        groups=3,
        **{"steps": STEPS, "reduction": "exact", **options},
    )


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def ranks(request) -> int:
    """The number of ranks of a group."""
    return request.param


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory, data_dir) -> support.Run:
    """A run without failures and with gloo between the groups."""
    own = {"groups": 3, "reduction": "exact", "steps": STEPS, "extra": ["--ranks-per-group", ranks]}
    run = support.start(tmp_path_factory.mktemp("alone") / "run", data_dir, **own)
    run.check()
    return run


@pytest.mark.parametrize(
    "point", ["backward", pytest.param("reduce", marks=pytest.mark.long), pytest.param("gate", marks=pytest.mark.long)]
)
def test_groups_that_are_killed_cost_no_step_and_no_bit(tmp_path, data_dir, point, ranks, alone):
    """In the backward pass some of the group's buckets may be on their way, in the other two some or all are reduced."""
    hold = Breakpoint(1, 2, point)
    run = start(tmp_path / "run", data_dir, HEALTHY, [hold], extra=["--ranks-per-group", ranks])
    run.strike_in_step(hold)
    run.check()
    assert support.outcome(run) == support.outcome(alone)


@pytest.mark.long
def test_a_rank_whose_abort_hangs_is_replaced_and_the_others_go_on(tmp_path, data_dir):
    hold = Breakpoint(1, 2, "reduce", 1)
    run = start(tmp_path / "run", data_dir, HANGS_IN_GROUP_2, [hold], rejoin={"enabled": True})
    run.strike_in_step(hold)
    run.check()
    [stuck] = [line for line in run.events("fault") if line["group"] == 2]
    assert stuck["code"] == StartOver.exit_code and "abort of an NCCL communicator has not returned" in stuck["detail"]
    assert {line["patched"] for line in run.events("recovery")} >= {8}, "group 0 computes the step of three"


@pytest.mark.long
@pytest.mark.parametrize("returns", [True, False], ids=["and comes back with its group", "and nobody waits for it"])
def test_a_healthy_rank_whose_engines_abort_hangs_ends(tmp_path, data_dir, returns):
    hold = Breakpoint(1, 2, "backward")
    own = {"rejoin": {"enabled": returns}, "extra": ["--ranks-per-group", 2], "steps": 60 if returns else STEPS}
    run = start(tmp_path / "run", data_dir, HANGS_INSIDE_GROUP_1, [hold], **own)
    run.strike_in_step(hold)
    if not returns:
        support.wait_for(lambda: len(run.events("fault")) == 2, run)
        hung = run.events("fault")[1]
        assert (hung["group"], hung["position"], hung["code"]) == (1, 1, StartOver.exit_code)
        assert "the abort of process group tensor parallelism has not returned" in hung["detail"]
    run.check()
    assert [line["joined"] for line in run.events("view") if line["joined"]] == [[1]] * returns
