"""The script `hf_accelerate.py` with megatron_ft: a lost process costs no step.

    megatron-ft launch --groups 2 --config examples/your_own_loop/ds_config.json --run-dir runs/sums \
        examples/your_own_loop/hf_accelerate_ft.py
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from sums import MixedSums, make_model
from torch.utils.data import DataLoader

import megatron_ft


def loss_fn(model, batch):
    terms, total = batch
    return F.cross_entropy(model(terms), total)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="sums.pt")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)
    session.init_distributed()  # before Accelerate looks for a world
    accelerator = Accelerator(cpu=args.device == "cpu")
    set_seed(args.seed)
    train, held_out = MixedSums([n for n in range(1000) if n % 5]), MixedSums(range(0, 1000, 5))
    loader = session.prepare(DataLoader(train, batch_size=8))
    model = make_model()
    model = accelerator.prepare_model(model, evaluation_mode=True)  # its device and precision, no DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    session.wrap(model, optimizer, scheduler=scheduler)
    for step in session.steps(args.epochs * len(loader)):
        for batch in session.microbatches(loader):
            session.backward(loss_fn(model, send_to_device(batch, accelerator.device)))
        result = session.commit()
        if session.is_writer and step % 10 == 0:
            print(f"step {step}  loss {result.loss:.4f}", flush=True)

    session.save_final(args.out, lambda path: torch.save(model.state_dict(), path))
    if session.is_writer:
        print(f"held-out loss {held_out.loss(model.cpu(), loss_fn):.4f}; saved in {args.out}")


if __name__ == "__main__":
    main()
