"""The script `lightning_module.py` with megatron_ft: a lost process costs no step.

    megatron-ft launch --groups 2 --config examples/your_own_loop/ds_config.json --run-dir runs/sums \
        examples/your_own_loop/lightning_ft.py
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from sums import MixedSums, make_model
from torch.utils.data import DataLoader

import megatron_ft
from megatron_ft.integrations.lightning_strategy import FaultTolerantStrategy, SessionLogger


class Adder(lightning.LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.model, self.steps = make_model(), steps

    def loss(self, batch):
        terms, total = batch
        return F.cross_entropy(self.model(terms), total)

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.log("held_out_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Report(lightning.Callback):
    def on_validation_epoch_end(self, trainer, module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(
                f"step {trainer.global_step}  held-out loss {trainer.callback_metrics['held_out_loss']:.4f}", flush=True
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="sums.pt")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)
    strategy = FaultTolerantStrategy(session, args.device)
    lightning.seed_everything(args.seed)
    train, held_out = MixedSums([n for n in range(1000) if n % 5]), MixedSums(range(0, 1000, 5))
    module = Adder(args.epochs * len(train) // 16)
    trainer = lightning.Trainer(
        accelerator=args.device,
        devices=1,
        max_epochs=args.epochs,
        strategy=strategy,
        gradient_clip_val=1.0,
        callbacks=[Report()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=SessionLogger(session),
    )
    trainer.fit(module, strategy.prepare(DataLoader(train, batch_size=8)), DataLoader(held_out, batch_size=50))
    session.save_final(args.out, lambda path: torch.save(module.state_dict(), path))


if __name__ == "__main__":
    main()
