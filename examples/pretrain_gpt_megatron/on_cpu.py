"""A stand-in for the GPU that megatron-core expects: on a machine without one, it runs on the CPU.

megatron-core asks ``torch.cuda`` for the current device, makes tensors on ``"cuda"``, and keeps random states of the GPU.
Each of these is answered with the CPU's. On a machine with a GPU, :func:`install` does nothing. Results on a CPU are those
of the same model in plain PyTorch; it serves to try things and to test.

Failures it assumes: none.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_ft.run.engines.megatron import megatron_names

REPLACED = (
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.transformer.torch_norm.WrappedTorchNorm",
)
"""Names of megatron-core that :func:`install` replaces."""

_installed: list[TorchFunctionMode] = []


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if name == "to":
            args = tuple("cpu" if isinstance(one, str | torch.device) and "cuda" in str(one) else one for one in args)
        found = function(*args, **kwargs)
        if name == "type" and len(args) == 1 and isinstance(found, str):  # its optimizers look for the type of a GPU
            return found.replace("torch.", "torch.cuda.", 1)
        return found


class _Stream:
    """A stream or event: on a CPU everything has happened already."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _nothing(name: str, *arguments: Any, **options: Any) -> None:
    """Stand for a function of torch.cuda that has nothing to do on a CPU."""


def _allow_sequence_parallel() -> None:
    """Let torch's norm be used with sequence parallelism, as those of apex and Transformer Engine can: its parameters say
    that their gradients are to be summed over the slices."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def marked(cls: type[Any], config: Any, *arguments: Any, **options: Any) -> Any:
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = make(cls, without, *arguments, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(marked)


def install() -> None:
    """Answer for the GPU from here on, in this process, unless there is one. Call it before megatron-core is used."""
    if torch.cuda.is_available() or _installed:
        return
    # What it compiles for a GPU takes longer than a run here.
    torch.compiler.set_stance("force_eager")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "set_device"):
        # Each is a function of its own: the compiler tells them apart.
        setattr(cuda, name, partial(_nothing, name))
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *arguments, **options: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *arguments, **options: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = cuda.stream = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.get_device_capability = lambda *arguments: (0, 0)

    exchange = dist.all_to_all_single

    def exchange_with_lists(output: Any, mine: Any, to: Any = None, sent: Any = None, **options: Any) -> Any:
        # It moves the sizes from a GPU to numpy, and here finds them moved already.
        sizes = {"output_split_sizes": to, "input_split_sizes": sent}
        for name in sizes:
            size = options.pop(name, sizes[name])
            options[name] = size.tolist() if isinstance(size, torch.Tensor) else size
        return exchange(output, mine, **options)

    world: Any = dist
    world.all_to_all_single = exchange_with_lists
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of missing kernels for GPUs
    megatron_names.check(REPLACED)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *arguments, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *arguments, **options: torch.set_rng_state(state)
    _allow_sequence_parallel()
    # It warns of a change of the CPU's random state, which here is the GPU's.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    mode = _CudaIsCpu()
    mode.__enter__()
    _installed.append(mode)
