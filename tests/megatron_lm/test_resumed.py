"""Megatron-LM's own checkpoints: a run that is told to stop saves one, and the same command goes on from the newest."""

from __future__ import annotations

import json
import signal

import pytest

from megatron_ft.config import megatron_lm_arguments
from tests import support
from tests.megatron_lm import runs

LAST = 40


@pytest.mark.long
def test_the_same_command_goes_on_after_a_stop_and_after_the_loss_of_all(tmp_path, megatron):
    saved = tmp_path / "saved"
    own = (*runs.MOCK, "--train-iters", LAST, "--eval-interval", 10)
    saves = ("--save", saved, "--load", saved, "--save-interval", 10, "--ckpt-format", "torch_dist")

    def start():
        return runs.start(tmp_path / "run", megatron, 1, *own, *saves)

    told = start()
    support.wait_for_step(told, 11)
    told.process.send_signal(signal.SIGTERM)
    said = [runs.said(told)]
    stopped_at = max(said[0].iterations)
    assert 12 < stopped_at < LAST and megatron_lm_arguments.newest(str(saved)) == str(stopped_at)
    lost = start()
    support.wait_for(lambda: megatron_lm_arguments.newest(str(saved)) == "30", lost)
    ranks = json.loads((lost.directory / "ranks.json").read_text())
    support.kill([lost.process.pid, *(rank["pid"] for rank in ranks)])
    said.append(runs.Said())
    for log in sorted(lost.directory.glob("logs/*.log")):
        said[1].read(log.read_text())
    last = start()
    said.append(runs.said(last))
    assert min(said[2].iterations) == 31 and max(said[2].iterations) == LAST
    assert "all iterations are done" in start().finish()
    whole = runs.Said()
    for one in said:
        begin = min(one.iterations)
        one.iterations.pop(begin + 1, None)  # Megatron does not clear the losses after the first iteration of a process
        whole.iterations.update(one.iterations)
        whole.evaluations.update(one.evaluations)
    reference = runs.plain(megatron, 2, *own)
    for name in ("lm loss", "learning rate", "consumed samples", "global batch size"):
        for iteration, values in whole.iterations.items():
            assert values[name] == pytest.approx(reference.iterations[iteration][name], rel=1e-5), (iteration, name)
    assert whole.evaluations.keys() == reference.evaluations.keys()
    for name, values in whole.evaluations.items():
        assert values == pytest.approx(reference.evaluations[name], rel=1e-5), name
