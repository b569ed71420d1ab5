"""What the loops of other libraries cannot do in a fault-tolerant run is refused, with the remedy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ft.errors import ConfigError

CONFIG = SimpleNamespace(gradient_clipping=1.0, fault_tolerance=SimpleNamespace(loss_reduction="microbatch"))
SESSION = SimpleNamespace(config=CONFIG, prepare=lambda dataloader: dataloader, is_writer=True)

TRAINER = {
    "gradient_accumulation_steps": (2, "is gradient_accumulation_steps in the config"),
    "max_grad_norm": (0.5, "gradient_clipping in the config, which is 1.0"),
    "save_strategy": ("steps", "checkpoint.directory in the config"),
    "eval_strategy": ("epoch", 'set it to "steps"'),
    "lr_scheduler_type": ("reduce_lr_on_plateau", "use another one"),
    "eval_on_start": (True, "the same model in the first step"),
    "include_num_input_tokens_seen": (True, "does not see the microbatches"),
}


@pytest.mark.parametrize("name", TRAINER)
def test_arguments_of_the_trainer_that_a_run_cannot_have_are_refused(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from megatron_ft.integrations.hf_trainer import FaultTolerantTrainer

    value, remedy = TRAINER[name]
    own = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 5, name: value}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **own)
    with pytest.raises(ConfigError, match=rf"TrainingArguments\({name}=.*{remedy}"):
        FaultTolerantTrainer(SESSION, model=torch.nn.Linear(1, 1), args=arguments)


def test_what_stops_or_saves_in_the_trainers_way_is_refused_before_the_first_step(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from megatron_ft.integrations.hf_trainer import FaultTolerantTrainer

    class Means(FaultTolerantTrainer):
        loss_is_scaled_for_ga = False

    section = SimpleNamespace(loss_reduction="token")
    by_token = SimpleNamespace(gradient_clipping=1.0, fault_tolerance=section)
    session = SimpleNamespace(**{**vars(SESSION), "config": by_token, "register": lambda *_: None})
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", save_strategy="no")

    def made(kind, *callbacks):
        return kind(session, model=torch.nn.Linear(1, 1), args=arguments, callbacks=list(callbacks))

    with pytest.raises(ConfigError, match="EarlyStoppingCallback: a run has a fixed number of steps"):
        made(FaultTolerantTrainer, transformers.EarlyStoppingCallback()).train()
    with pytest.raises(ConfigError, match='set loss_reduction to "microbatch"'):
        made(Means).train()


LIGHTNING = {
    "accumulate_grad_batches": ({"accumulate_grad_batches": 2}, "is gradient_accumulation_steps in the config"),
    "gradient_clip_val": ({"gradient_clip_val": None}, "gradient_clipping in the config, which is 1.0"),
    "checkpoint_callbacks": ({"enable_checkpointing": True}, "set enable_checkpointing=False"),
    "limit_train_batches": ({"limit_train_batches": 3}, "set max_steps"),
    "max_time": ({"max_time": "00:00:01:00"}, "callback Timer: a run has a fixed number of steps"),
    "a hook of the module": ({}, "has a method optimizer_step"),
    "no last step": ({"max_epochs": -1}, "set max_steps or max_epochs"),
    "scheduler by epoch": ({}, '"interval": "step"'),
    "another dataloader": ({}, "prepare has not made the dataloader"),
}


@pytest.mark.parametrize("case", LIGHTNING)
def test_settings_of_lightning_that_a_run_cannot_have_are_refused(case, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from megatron_ft.integrations.lightning_strategy import FaultTolerantStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            by_epoch = [torch.optim.lr_scheduler.ConstantLR(optimizer)]
            return [optimizer], by_epoch if case == "scheduler by epoch" else []

    class Hooked(Module):
        def optimizer_step(self, *_):
            pass

    options, remedy = LIGHTNING[case]
    given = {"max_epochs": 1, "gradient_clip_val": 1.0, "enable_checkpointing": False, **options}
    strategy = FaultTolerantStrategy(SESSION, "cpu")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet, **given
    )
    dataloader = torch.utils.data.DataLoader(torch.zeros(4, 1))
    turns = dataloader if case == "another dataloader" else strategy.prepare(dataloader)
    with pytest.raises(ConfigError, match=remedy):
        trainer.fit(Hooked() if case == "a hook of the module" else Module(), turns)
