"""The global random number generators of the process: those of ``random``, ``numpy.random`` and torch (CPU and devices).

Code of the user (dataset, collate function, transform, loss, optimizer hook, the script between two steps) may draw from any
of them. They are seeded before each call of such code, from what the call is for (``data.order``): a microbatch, a step.
So the numbers do not depend on the group that makes the call, nor on what was drawn before, and no state has to be saved
and restored, which would take twenty times as long.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch

_last = 0


def seed(number: int) -> None:
    """Seed all generators. ``number``: below 2**63."""
    global _last
    _last = number
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    # torch.manual_seed formats a stack trace for each back end that is missing: half the time of a small step.
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(number)
    elif torch.accelerator.is_available():
        torch.manual_seed(number)


def seed_again() -> None:
    """Seed with the number of the last call of :func:`seed`: take back what was drawn since."""
    seed(_last)


def drawn(number: int) -> list[str]:
    """Return the names of the generators that were drawn from since :func:`seed` was called with ``number``, with which they
    are seeded again."""
    found = _states()
    seed(number)
    return [name for name, state in _states().items() if found[name] != state]


def _states() -> dict[str, bytes]:
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    states = {
        "random": random.getstate(),
        "numpy.random": np.random.get_state(),
        "torch": torch.get_rng_state().tolist(),
        "torch.cuda": [generator.get_state().tolist() for generator in devices],
    }
    return {name: pickle.dumps(state) for name, state in states.items()}
