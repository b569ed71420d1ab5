"""A script's own loop over the microbatches of a step: what it sets before it commits acts in that step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_ft.errors import ConfigError, RunStopped
from megatron_ft.run.engines.port import StepResult
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.run.explicit_loop import ExplicitLoop
from megatron_ft.types import Microbatch

BATCHES = 2


class Script:
    """A script with a model, whose steps a protocol makes: ``attempts`` of each, of which the last one counts."""

    def __init__(self, attempts: int = 1) -> None:
        self.loop, self.attempts, self.step = ExplicitLoop(), attempts, 0
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.engine = TorchNativeEngine(self.model, self.optimizer, self.loop.loss_fn)
        self.before_update: Callable[[], object] = self.loop.await_commit

    def make(self) -> StepResult:
        for _ in range(self.attempts):
            self.engine.begin_step()
            for index in range(BATCHES):
                self.engine.compute(Microbatch(self.step, 0, index), torch.ones(2, 4), 0, lambda point: None)
        self.engine.keep_local(0)
        self.before_update()
        result = self.engine.update(self.step, BATCHES, lambda point: None)
        self.step += 1
        return result

    def compute(self) -> int:
        """Compute the microbatches of a step; return how many the script has seen."""
        seen = 0
        for batch in self.loop.microbatches(self.make):
            self.loop.backward(self.model(batch).mean())
            seen += 1
        return seen

    def moved(self, before: torch.Tensor) -> float:
        return (self.model.weight.detach() - before).abs().max().item()


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_value_that_is_set_before_commit_acts_in_that_step(attempts):
    """Also when the sums of the first attempt are discarded: the loop then goes on."""
    script = Script(attempts)
    for rate in (0.0, 0.1, 0.0):
        before = script.model.weight.detach().clone()
        assert script.compute() == BATCHES * attempts
        assert script.moved(before) == 0 and script.loop.within_step
        script.optimizer.param_groups[0]["lr"] = rate
        assert script.loop.commit().learning_rate == rate
        assert script.moved(before) == pytest.approx(rate / 4) and not script.loop.within_step


def test_a_step_whose_state_came_from_another_group_waits_for_no_commit():
    script = Script()
    script.before_update = lambda: None
    assert script.compute() == BATCHES
    assert script.step == 1 and script.loop.commit().step == 0


def test_a_step_ends_with_one_commit_after_its_loop():
    script = Script()
    with pytest.raises(ConfigError, match="before the loop over session.microbatches has ended"):
        script.loop.commit()
    script.compute()
    with pytest.raises(ConfigError, match="again in the same step: call session.commit"):
        script.compute()
    script.loop.commit()
    with pytest.raises(ConfigError, match="call it once"):
        script.loop.commit()


def test_what_ends_the_step_after_commit_is_raised_in_the_script():
    script = Script()

    def stopped() -> None:
        script.loop.await_commit()
        raise RunStopped("the run is over")

    script.before_update = stopped
    script.compute()
    with pytest.raises(RunStopped, match="the run is over"):
        script.loop.commit()


def test_a_commit_inside_of_the_loop_is_refused_after_the_last_microbatch_too():
    script = Script()
    with pytest.raises(ConfigError, match="before the loop over session.microbatches has ended"):
        for number, batch in enumerate(script.loop.microbatches(script.make), start=1):
            script.loop.backward(script.model(batch).mean())
            if number == BATCHES:
                script.loop.commit()


def test_a_loop_that_is_left_after_its_last_microbatch_can_be_committed():
    script = Script()
    for _, batch in zip(range(BATCHES), script.loop.microbatches(script.make), strict=False):
        script.loop.backward(script.model(batch).mean())
    assert script.loop.commit() is not None
