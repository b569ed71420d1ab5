"""What Megatron-LM's writers are given is logged once for a step, as it was given."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ft.errors import EngineError
from megatron_ft.integrations.megatron_lm import writers


@pytest.fixture
def session(tmp_path, monkeypatch):
    """One rank, whose group is the last one of a world of one."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    logged = {}
    env = SimpleNamespace(run_dir=tmp_path)
    return SimpleNamespace(env=env, step=1, log=logged.update, logged=logged)


@pytest.fixture
def module(monkeypatch):
    """A loop's module with Megatron's functions that log, and the module of its writers."""
    found = SimpleNamespace(get_args=lambda: SimpleNamespace(curr_iteration=4))
    monkeypatch.setattr(writers, "importlib", SimpleNamespace(import_module=lambda name: found))

    def training_log(iteration):
        found._GLOBAL_TENSORBOARD_WRITER.add_scalar("lm loss", torch.tensor([2.5]), iteration)
        found._GLOBAL_TENSORBOARD_WRITER.add_scalar("grad-norm", 1.0, iteration)
        found._GLOBAL_TENSORBOARD_WRITER.add_scalar("lm loss vs samples", 2.5, 16 * iteration)
        found._GLOBAL_WANDB_WRITER.log({"lm loss": 2.5}, iteration)

    def evaluate_and_print_results(iteration):
        found._GLOBAL_TENSORBOARD_WRITER.add_scalar("lm loss validation", 3.0, iteration)

    found.training_log, found.evaluate_and_print_results = training_log, evaluate_and_print_results
    return found


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(
        rank=0, world_size=1, tensorboard_dir=str(tmp_path / "logs"), tensorboard_queue_size=9, wandb_project="p",
        wandb_exp_name="e", wandb_save_dir="", wandb_entity="", save=str(tmp_path / "saved"), dtype=torch.bfloat16,
    )  # fmt: skip


def test_values_of_an_iteration_and_of_an_evaluation_after_it_are_one_entry(session, module, args):
    pytest.importorskip("tensorboard", reason="no tensorboard")
    writers.Writers(session).install(module)
    module._set_tensorboard_writer(args)
    module._set_wandb_writer(args)
    module._GLOBAL_TENSORBOARD_WRITER.add_text("seed", "7", 0)
    module.training_log(5)
    module.evaluate_and_print_results(5)
    told = json.loads(session.logged["megatron_lm"])
    validation = [5, {"lm loss validation": 3.0}]
    both = [[5, {"lm loss": 2.5, "grad-norm": 1.0}], [80, {"lm loss vs samples": 2.5}], validation]
    assert told == {"iteration": 5, "tensorboard": both, "wandb": [[5, {"lm loss": 2.5}]]}
    session.step = 2
    module.evaluate_and_print_results(6)
    assert json.loads(session.logged["megatron_lm"])["tensorboard"] == [[6, {"lm loss validation": 3.0}]]
    about = json.loads((session.env.run_dir / "megatron_lm" / "writers.json").read_text())
    assert about["texts"] == [["seed", "7", 0]]
    assert about["tensorboard"] == {"log_dir": args.tensorboard_dir, "max_queue": 9}
    assert (about["wandb"]["project"], about["wandb"]["name"], about["wandb"]["dir"]) == (
        "p",
        "e",
        f"{args.save}/wandb",
    )
    assert about["wandb"]["config"]["dtype"] == "torch.bfloat16"


def test_a_group_that_comes_back_leaves_what_the_first_one_has_written(session, module, args):
    pytest.importorskip("tensorboard", reason="no tensorboard")
    for text in ("first", "later"):
        writers.Writers(session).install(module)
        module._set_tensorboard_writer(args)
        module._set_wandb_writer(args)
        module._GLOBAL_TENSORBOARD_WRITER.add_text("iteration", text, 0)
        module.training_log(5)
    about = json.loads((session.env.run_dir / "megatron_lm" / "writers.json").read_text())
    assert about["texts"] == [["iteration", "first", 0]]


def test_what_is_no_scalar_is_refused(session, module, args):
    pytest.importorskip("tensorboard", reason="no tensorboard")
    writers.Writers(session).install(module)
    module._set_tensorboard_writer(args)
    with pytest.raises(EngineError, match=r"SummaryWriter.add_histogram is not supported: .* leave it out"):
        module._GLOBAL_TENSORBOARD_WRITER.add_histogram("weights", torch.ones(3), 1)
