"""The script `ddp.py` with megatron_ft and its own loop over microbatches; `ft.py` has a shorter one.

    megatron-ft launch --groups 2 --config examples/your_own_loop/ds_config.json --run-dir runs/sums \
        examples/your_own_loop/own_loop.py
"""

import argparse

import torch
import torch.nn.functional as F
from sums import Sums, make_model
from torch.utils.data import DataLoader

import megatron_ft


def loss_fn(model, batch):
    terms, total = batch
    return F.cross_entropy(model(terms), total)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="sums.pt")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)
    torch.manual_seed(args.seed)
    train, held_out = Sums([n for n in range(1000) if n % 5]), Sums(range(0, 1000, 5))
    loader = session.prepare(DataLoader(train, batch_size=8, shuffle=True))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    session.wrap(model, optimizer, scheduler=scheduler)
    for step in session.steps(args.epochs * len(loader)):
        for batch in session.microbatches(loader):
            loss = loss_fn(model, batch)
            session.backward(loss)
        result = session.commit()  # instead of all_reduce, clip_grad_norm_, optimizer.step, scheduler.step, zero_grad
        if session.is_writer and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}", flush=True)

    session.save_final(args.out, lambda path: torch.save(model.state_dict(), path))
    if session.is_writer:
        print(f"held-out loss {held_out.loss(model, loss_fn):.4f}; saved in {args.out}")


if __name__ == "__main__":
    main()
