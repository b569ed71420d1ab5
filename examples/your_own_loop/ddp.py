"""An ordinary script for DistributedDataParallel; `ft.py` is the same script with megatron_ft.

torchrun --nproc-per-node 2 examples/your_own_loop/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sums import Sums, make_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def loss_fn(model, batch):
    terms, total = batch
    return F.cross_entropy(model(terms), total)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="sums.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train, held_out = Sums([n for n in range(1000) if n % 5]), Sums(range(0, 1000, 5))
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            step += 1

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.out)
        print(f"held-out loss {held_out.loss(model.module, loss_fn):.4f}; saved in {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
