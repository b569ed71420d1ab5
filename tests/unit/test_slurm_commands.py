"""Replies of Slurm's commands, and the place of an array element."""

from __future__ import annotations

import pytest

from megatron_ft.cluster.launchers.slurm import commands, job_array
from megatron_ft.cluster.launchers.slurm.supervisor import Supervisor
from megatron_ft.cluster.launchers.supervisor_loop import limits
from megatron_ft.config import schema
from megatron_ft.errors import LaunchError

TREE = """SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]
"""


@pytest.fixture
def said(monkeypatch):
    """Set the replies of the commands; empty when Slurm has none."""
    answers = {"topology": TREE}
    monkeypatch.setattr(commands, "_answer", lambda *command: answers[command[-1]])
    return answers


def test_the_switch_of_each_node(said):
    assert commands.switches(["n1", "n3", "n4"]) == {"n1": "s1", "n3": "s2", "n4": "s2"}
    assert commands.switches(["n1", "n2"]) == {}, "all on one: nothing to spread over"
    assert commands.switches(["n1", "n9"]) == {}, "one that no switch knows"
    said["topology"] = ""
    assert commands.switches(["n1", "n3"]) == {}


@pytest.mark.parametrize(
    ("groups", "nodes", "spares", "domains"),
    [
        (3, "n[1-4]", 1, "s1,s2,s2"),
        (6, "n[1-4]", 1, "s1,s1,s2,s2,s2,s2"),
        (2, "n[1-4]", 0, "s1,s2"),
    ],
)
def test_groups_are_spread_over_switches(said, tmp_path, groups, nodes, spares, domains):
    """n1, the node of the batch shell, is the last host."""
    run = schema.resolve({}, groups=groups, ranks_per_group=2)
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": "n1"}
    made = Supervisor(["--x"], run, tmp_path, spares, limits(run.fault_tolerance), environ=environ)
    assert made._nodes == ["n2", "n3", "n4", "n1"]
    assert made._domains(made._nodes[: 4 - spares]) == ["--failure-domains", domains]


def test_variables_of_the_batch_shell_are_not_passed_to_its_steps(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        commands.subprocess, "Popen", lambda command, env, **options: asked.update(command=command, env=env)
    )
    for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    commands.start_step(
        *(commands.Job("5", 0, ("n1",), "n1"), "n1", "mft/0/n1/0", ["true"], commands.Path("/runs/100%.log")),
        ["--container-image=a.sqsh"],
    )
    left = {name for name in asked["env"] if name.startswith("SLURM")}
    assert {"SLURM_JOB_ID", "SLURM_CONF"} <= left and not left & {
        "SLURM_NNODES",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_STEP_ID",
    }
    assert "--output=/runs/100%%.log.%N" in asked["command"]
    assert asked["command"][-2:] == ["--container-image=a.sqsh", "true"]


ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n2"}
ARRAY |= {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in {"ID": 1, "MIN": 0, "MAX": 4, "COUNT": 5}.items()}


def test_an_element_knows_its_place_and_the_number_of_working_elements():
    where = job_array.place({**ARRAY, "SLURM_RESTART_COUNT": "2"})
    assert where == job_array.Place(array="7", element=1, first=0, last=4, count=5, restarts=2, node="n2")
    settings = schema.FaultToleranceConfig()
    assert job_array.limits(settings, where, 1, 3).hosts == 4 and job_array.limits(settings, where, 1, 3).whole is None


@pytest.mark.parametrize(
    "change, words",
    [({"SLURM_ARRAY_JOB_ID": None}, "not an element"), ({"SLURM_JOB_NUM_NODES": "2"}, "this element has 2 nodes")],
)
def test_a_process_that_is_not_an_element_is_refused(change, words):
    environment = {name: value for name, value in (ARRAY | change).items() if value is not None}
    with pytest.raises(LaunchError, match=words):
        job_array.place(environment)


def test_an_array_of_spares_is_refused():
    with pytest.raises(LaunchError, match="--spare-hosts is 5 and the array has 5 elements"):
        job_array.limits(schema.FaultToleranceConfig(), job_array.place(ARRAY), 5, 3)
