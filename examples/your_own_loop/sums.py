"""A small task for all scripts: add three numbers."""

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

DIGITS = 10


class Sums(Dataset):
    """Samples of three numbers from 0 to 9, and their sum."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        terms = torch.tensor([number // 100, number // 10 % 10, number % 10])
        return terms, terms.sum()

    @torch.no_grad()
    def loss(self, model, loss_fn):
        """Return the mean loss over all samples."""
        return loss_fn(model, default_collate([self[index] for index in range(len(self))])).item()


class MixedSums(Sums):
    """The same samples in a mixed order, for scripts that do not shuffle."""

    def __getitem__(self, index):
        return super().__getitem__(index * 7 % len(self))


class TokenSums(MixedSums):
    """The same as token ids: the three numbers, then their sum. The sum is a label, and the third number where it is odd."""

    vocab_size = 3 * DIGITS

    def __getitem__(self, index):
        terms, total = super().__getitem__(index)
        labels = torch.full((4,), -100)
        labels[3] = total
        if terms[2] % 2:
            labels[2] = terms[2]
        return {"input_ids": torch.cat([terms, total[None]]), "labels": labels}


def make_model():
    terms = nn.EmbeddingBag(DIGITS, 16, mode="sum")
    return nn.Sequential(terms, nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3 * DIGITS))
