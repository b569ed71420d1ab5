"""What the launcher of an unchanged script of Megatron-LM shows, and that its steps can be computed again."""

from __future__ import annotations

import pytest

from tests import support
from tests.megatron_lm import runs


@pytest.mark.long
def test_the_console_has_what_megatron_prints_once_and_a_step_can_be_computed_again(tmp_path, megatron):
    own = (*runs.MOCK, "--pipeline-model-parallel-size", 2, "--overlap-grad-reduce")
    run = runs.start(tmp_path / "run", megatron, 2, *own, reduction="exact")
    shown = run.finish()
    assert run.process.returncode == 0, f"{shown}\n{run.logs()}"
    steps = len(run.events("step"))
    assert shown.count("consumed samples: ") == steps, "the last rank's, of one group"
    assert shown.count("using world size: 2,") == 1, "the first rank's"
    assert shown.count("--overlap-grad-reduce is left out: ") == 1
    replay = support.ft("replay", run.directory, "--step", 3, env=runs.environment(megatron))
    assert replay.returncode == 0 and "step 3: the record agrees" in replay.stdout, replay.stdout + replay.stderr
