"""An ordinary script for Hugging Face's Accelerate; `hf_accelerate_ft.py` is the same script with megatron_ft.

python examples/your_own_loop/hf_accelerate.py
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sums import MixedSums, make_model
from torch.utils.data import DataLoader


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

    accelerator = Accelerator(cpu=args.device == "cpu", gradient_accumulation_steps=2)
    set_seed(args.seed)
    train, held_out = MixedSums([n for n in range(1000) if n % 5]), MixedSums(range(0, 1000, 5))
    loader = DataLoader(train, batch_size=8)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader) // 2)

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step, losses = 0, []
    for _ in range(args.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model, batch)
                accelerator.backward(loss)
                losses.append(accelerator.gather(loss.detach()).mean().item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if accelerator.is_main_process and step % 10 == 0:
                    print(f"step {step}  loss {sum(losses) / len(losses):.4f}", flush=True)
                step, losses = step + 1, []

    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.out)
    if accelerator.is_main_process:
        print(f"held-out loss {held_out.loss(model.cpu(), loss_fn):.4f}; saved in {args.out}")


if __name__ == "__main__":
    main()
