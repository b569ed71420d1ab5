"""The launch that slurm/megatron_lm.sbatch asks for is one that supervise accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from megatron_ft import cli
from megatron_ft.commands import supervise_command
from tests import support

RECORDER = "#!{python}\nimport json, sys\njson.dump(sys.argv[1:], open({file!r}, 'w'))\n"


def test_the_recipe_becomes_groups_of_its_own_size(tmp_path):
    ft, said = tmp_path / "megatron-ft", tmp_path / "said.json"
    ft.write_text(RECORDER.format(python=sys.executable, file=str(said)))
    ft.chmod(0o755)
    own = {"MEGATRON_FT": ft, "MEGATRON_LM": tmp_path / "Megatron LM", "DATA": tmp_path / "text_document"}
    job = {"SLURM_SUBMIT_DIR": tmp_path, "SLURM_JOB_NAME": "gpt", "SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 9}
    env = {**os.environ, **{name: str(value) for name, value in {**own, **job}.items()}}
    script = support.ROOT / "slurm" / "megatron_lm.sbatch"
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=support.TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    options = cli._parser().parse_args(json.loads(said.read_text()))
    asked = supervise_command._of_job(options)
    run = asked.settings
    assert (run.groups, run.stages, run.slices, run.ranks_per_group) == (4, 2, 8, 16)
    assert run.samples_per_microbatch * run.microbatches == 512
    assert asked.megatron_lm and str(asked.script) == f"{tmp_path}/Megatron LM/pretrain_gpt.py"
    assert asked.arguments[-1] == "torch_dist" and asked.spare_hosts == 1
