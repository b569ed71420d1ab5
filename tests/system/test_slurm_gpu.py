"""Jobs of ``slurm/gpu.sbatch`` on a real Slurm, whose nodes have GPUs by name only: what runs there runs on CPUs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from megatron_ft.record import history, invariants
from tests import slurm, support
from tests.stores import await_

pytestmark = [pytest.mark.system, slurm.needs_slurm]

GPUS, STEPS = 2, 10
cluster = slurm.lab(3, gpus=GPUS)
APPTAINER = """#!/bin/bash
# Stands in for the program: apptainer exec --nv --bind DIR --pwd DIR IMAGE COMMAND
[ "$1 $2 $3 $5" = "exec --nv --bind --pwd" ] && [ -d "$4" ] && [ -f "$7" ] || exit 9
cd "$6" && echo inside >> "$7" && shift 7 && exec "$@"
"""


@pytest.fixture
def batch(cluster, tmp_path):
    """Return a function that submits a job and returns its output when it has ended."""

    def run(*words: object, code: int = 0, **variables: object) -> str:
        own = {"MEGATRON_FT": str(Path(sys.executable).parent / "megatron-ft"), "RUN_DIR": str(tmp_path / "run")}
        own |= {"GPU_OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
        options = ["--parsable", f"--output={tmp_path}/batch.log", f"--gres=gpu:{GPUS}"]
        script = support.ROOT / "slurm" / "gpu.sbatch"
        command = ["sbatch", *options, *map(str, words[:1]), script, *map(str, words[1:])]
        job = cluster.run(command, env={**cluster.env, **own}, cwd=support.ROOT, check=True).stdout.strip()
        asked = ["scontrol", "--oneliner", "show", "job", job]

        def ended() -> object:
            return re.search(r"JobState=(COMPLETED|FAILED) ", cluster.run(asked, check=True).stdout)

        await_(ended, f"the end of job {job}", slurm.DEADLINE_S, slurm.LOOK_S)
        said = (tmp_path / "batch.log").read_text()
        assert f"ExitCode={code}:0 " in cluster.run(asked, check=True).stdout, said
        return said

    return run


def training(tmp_path: Path, data_dir: Path) -> list[object]:
    return [support.SCRIPT, "--", "--data", data_dir, *slurm.own_arguments(STEPS)]


def check(run_dir: Path) -> list[dict]:
    lines = history.read(run_dir)
    groups = GPUS * 2
    found = invariants.check_history(lines, groups * support.PER_GROUP)
    assert not found, found
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(STEPS))
    assert [line for line in lines if line["event"] == "start"][0]["groups"] == groups
    return lines


def test_a_run_has_a_group_for_each_gpu_and_a_node_in_reserve(batch, tmp_path, data_dir):
    config = slurm.config(tmp_path / "config.json", tmp_path / "saved")
    batch("--nodes=3", *training(tmp_path, data_dir), CONFIG=config)
    check(tmp_path / "run")


def test_a_run_in_apptainer(batch, tmp_path, data_dir):
    program, image = tmp_path / "bin" / "apptainer", tmp_path / "image.sif"
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(0o755)
    image.touch()
    config = slurm.config(tmp_path / "config.json", tmp_path / "saved")
    own = {"CONTAINER": "apptainer", "IMAGE": image, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    batch("--nodes=3", *training(tmp_path, data_dir), CONFIG=config, **own)
    check(tmp_path / "run")
    assert image.read_text() == "inside\n" * 3


@pytest.mark.long
def test_a_qualification_of_two_nodes(batch, tmp_path):
    batch("--nodes=2", WHAT="qualify")
    document = json.loads((tmp_path / "run" / "qualify.json").read_text())
    assert [host["name"] for host in document["hosts"]] == ["n1", "n2"]
    states = {check["outcome"] for check in document["checks"]}
    assert "proven" in states and "failed" not in states, document


@pytest.mark.parametrize(
    "variables, said", [({"WHAT": "tune"}, "WHAT is 'tune'"), ({"CONTAINER": "docker"}, "CONTAINER is 'docker'")]
)
def test_a_wrong_word_is_refused(batch, variables, said):
    assert said in batch("--nodes=1", code=2, **variables)
