"""``megatron-ft replay`` and ``megatron-ft doctor --deterministic``: short runs that check a script."""

from __future__ import annotations

import json

import pytest

from megatron_ft.record import history
from tests import support

OWN = ("--layers", 1, "--width", 32, "--seq-len", 16)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir):
    """A run with exact reduction, some of whose microbatches were verified."""
    directory = tmp_path_factory.mktemp("audit")
    options = {"reduction": "exact", "verify": {"microbatches_per_step": 2}, "steps": 5, "groups": 2, "own": OWN}
    run = support.start(directory / "run", data_dir, **options)
    run.finish()
    assert run.process.returncode == 0, run.logs()
    return run


def test_a_step_that_is_computed_again_agrees_with_the_record(finished):
    done = support.ft("replay", finished.directory, "--step", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss: equal in all 5 steps" in done.stdout and "parameters after step 4: equal" in done.stdout
    assert done.stdout.count("agrees\n") == 2


def test_a_digest_in_the_record_that_is_not_computed_again_names_its_group(finished, tmp_path):
    lines = finished.history
    line = next(line for line in lines if line["event"] == "verified" and line["step"] == 3)
    microbatch = min(line["digests"])
    line["digests"][microbatch]["1"] += 1
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((finished.directory / "config.json").read_text())
    (copy / history.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = support.ft("replay", copy, "--step", 3, "--microbatch", microbatch.partition("/")[2])
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"microbatch {microbatch}: the digest of group 1 is not that computed again" in done.stdout


@pytest.mark.long
def test_a_run_whose_sums_depend_on_the_groups_is_not_computed_again(reference):
    done = support.ft("replay", reference.directory, "--step", 1)
    assert done.returncode == 2 and 'reduction "fast"' in done.stderr and "Traceback" not in done.stderr


PID = """
import os
from torch.nn import functional
cross_entropy = functional.cross_entropy
functional.cross_entropy = lambda *both: cross_entropy(*both) * (1 + os.getpid() * 1e-6)
"""


@pytest.mark.parametrize(("change", "code", "said"), [("", 0, "deterministic: "), (PID, 1, "not deterministic: ")])
def test_the_doctor_says_whether_a_model_is_deterministic(tmp_path, data_dir, change, code, said):
    script = support.changed_script(tmp_path / "train.py", change)
    job = ["--data", data_dir, "--steps", 100, *OWN]
    done = support.ft("doctor", "--deterministic", script, "--", *job)
    assert done.returncode == code and done.stdout.startswith(said), done.stdout + done.stderr
