"""Megatron-LM's own checkpoints: a run that is told to stop saves one, and the same command goes on from it."""

from __future__ import annotations

import signal

import pytest

from megatron_ft.config import megatron_lm_arguments
from tests import support
from tests.megatron_lm import runs

LAST = 40


@pytest.mark.long
def test_the_same_command_goes_on_after_a_stop_and_ends_when_all_iterations_are_done(tmp_path, megatron):
    saved = tmp_path / "saved"
    own = (*runs.MOCK, "--train-iters", LAST, "--eval-interval", 10)
    saves = ("--save", saved, "--load", saved, "--save-interval", 10, "--ckpt-format", "torch_dist")
    gate = support.Gate(tmp_path, slowly=LAST, script=runs.SCRIPT)

    def start():
        return runs.start(tmp_path / "run", megatron, 1, *own, *saves, script=gate.script)

    told = start()
    support.wait_for_step(told, 2)
    told.process.send_signal(signal.SIGTERM)
    before = runs.said(told)
    stopped_at = max(before.iterations)
    assert megatron_lm_arguments.newest(str(saved)) == str(stopped_at)
    gate.open()
    after = runs.said(start())
    assert min(after.iterations) == stopped_at + 1
    assert "all iterations are done" in start().finish()
    assert runs.differences(runs.plain(megatron, 2, *own), before, after) == []
