"""A script in torchtitan's style: FSDP2 on a mesh, its own train loop; `titan_style_ft.py` is the same with megatron_ft.

torchrun --nproc-per-node 2 examples/your_own_loop/titan_style.py
"""

import argparse
import itertools
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sums import MixedSums, make_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of parallelism; their product is the number of ranks."""

    dp_shard: int

    def build_mesh(self, device):
        return init_device_mesh(device, (self.dp_shard,), mesh_dim_names=("dp",))


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
        self.args, self.step = args, 0
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        self.mesh = ParallelDims(dp_shard=dist.get_world_size()).build_mesh(args.device)["dp"]
        torch.manual_seed(args.seed)
        train, self.held_out = MixedSums([n for n in range(1000) if n % 5]), MixedSums(range(0, 1000, 5))
        self.loader = DataLoader(train, batch_size=8)
        self.model = parallelize(make_model().to(args.device), self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))

    def batches(self):
        endless = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for batch in itertools.islice(endless, self.step * self.args.accumulate, None):
            yield [part.chunk(self.mesh.size())[self.mesh.get_local_rank()].to(self.args.device) for part in batch]

    def train_step(self, batches):
        self.optimizer.zero_grad()
        losses = []
        for _ in range(self.args.accumulate):
            loss = loss_fn(self.model, next(batches)) / self.args.accumulate
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
        self.optimizer.step()
        self.scheduler.step()
        loss = torch.stack(losses).sum()
        dist.all_reduce(loss, group=self.mesh.get_group())
        return loss.item() / self.mesh.size(), norm.item()

    def train(self):
        batches = self.batches()
        while self.step < self.args.steps:
            began = time.perf_counter()
            loss, norm = self.train_step(batches)
            if self.step % 10 == 0:
                samples = 8 * self.args.accumulate / (time.perf_counter() - began)
                self.print(f"step {self.step}  loss {loss:.4f}  |g| {norm:.3f}  {samples:.0f} samples/s")
            self.step += 1
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    def save(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": self.step}
        dcp.save(state, checkpoint_id=f"{self.args.checkpoints}/step-{self.step}")

    def load(self, path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def print(self, line):
        if dist.get_rank() == 0:
            print(line, flush=True)

    def finish(self):
        held_out = self.held_out.loss(self.model, loss_fn)
        whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(whole, self.args.out)
        self.print(f"held-out loss {held_out:.4f}; saved in {self.args.out}")
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches in a step")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--checkpoints", default="runs/titan", help="directory of the checkpoints")
    parser.add_argument("--resume", help="checkpoint to go on from")
    parser.add_argument("--out", default="sums.pt")
    args = parser.parse_args()
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.train()
    trainer.finish()


if __name__ == "__main__":
    main()
