"""The script `titan_style.py` with megatron_ft: FSDP2 inside each group, and a lost group costs no step.

    megatron-ft launch --groups 2 --config examples/your_own_loop/sharded.json --run-dir runs/sums \
        examples/your_own_loop/titan_style_ft.py

Checkpoints are the config's (`checkpoint.directory`): the same command goes on from the newest one.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sums import MixedSums, make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import megatron_ft


def parallelize(model, mesh):
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_fn(model, batch):
    terms, total = batch
    return F.cross_entropy(model(terms), total)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.session = megatron_ft.init(seed=args.seed)
        self.mesh = self.session.mesh(args.device)["dp"]
        torch.manual_seed(args.seed)
        train, self.held_out = MixedSums([n for n in range(1000) if n % 5]), MixedSums(range(0, 1000, 5))
        self.loader = self.session.prepare(DataLoader(train, batch_size=8))
        self.model = parallelize(make_model().to(args.device), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.session.wrap(self.model, self.optimizer, scheduler=self.scheduler)

    def train_step(self):
        for batch in self.session.microbatches(self.loader):  # this rank's part of the samples
            loss = loss_fn(self.model, [part.to(self.args.device) for part in batch])
            self.session.backward(loss)
        result = self.session.commit()
        return result.loss, result.gradient_norm

    def train(self):
        for step in self.session.steps(self.args.steps):
            began = time.perf_counter()
            loss, norm = self.train_step()
            if step % 10 == 0:
                samples = 8 * self.session.config.groups / (time.perf_counter() - began)
                self.print(f"step {step}  loss {loss:.4f}  |g| {norm:.3f}  {samples:.0f} samples/s")

    def print(self, line):
        if self.session.is_writer:
            print(line, flush=True)

    def finish(self):
        held_out = self.held_out.loss(self.model, loss_fn)
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        self.session.save_final(self.args.out, lambda path: torch.save(whole, path))
        self.print(f"held-out loss {held_out:.4f}; saved in {self.args.out}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="sums.pt")
    args = parser.parse_args()
    trainer = Trainer(args)
    trainer.train()
    trainer.finish()


if __name__ == "__main__":
    main()
