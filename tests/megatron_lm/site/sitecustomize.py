"""Lets Megatron-LM's training loop run on CPUs and under Python 3.11. A directory in PYTHONPATH that has this file is all
that it takes: the script and the loop are as they are.

A stand-in is used only where the real thing is missing.
"""

from __future__ import annotations

import atexit
import collections
import sys
import types
import typing
from pathlib import Path
from typing import Any

KERNELS = ("megatron.core.transformer.moe.ops.paged_stash", "megatron.core.transformer.moe.paged_stash")
"""The module that needs triton, which only torch's builds for GPUs bring: in 0.19, and in versions without it."""
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "pretrain_gpt_megatron"
_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")

if sys.version_info < (3, 12):
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # the name is of Python 3.12


class _Kernels(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


class _Device:
    name = "cpu"
    total_memory = 1 << 34
    multi_processor_count = 1
    major, minor = 9, 0


def _install() -> None:
    """Answer for what the loop asks of a GPU, beyond what megatron-core asks."""
    import torch

    if torch.cuda.is_available():
        return
    files = {one: Path(*one.split(".")).with_suffix(".py") for one in KERNELS}
    found = (one for one, file in files.items() if any(Path(path, file).exists() for path in sys.path))
    for name in found:
        sys.modules[name] = _Kernels(name)
        break
    sys.path.insert(0, str(_EXAMPLE))
    import on_cpu

    on_cpu.install()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.get_device_properties = lambda *arguments: _Device
    cuda.get_device_name = lambda *arguments: _Device.name
    cuda.reset_peak_memory_stats = lambda *arguments: None
    for name in _MEMORY:
        setattr(cuda, name, lambda *arguments: 0)
    cuda.memory_stats = lambda *arguments: collections.defaultdict(int)
    for name in ("ByteTensor", "FloatTensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # they lie there compiled
    atexit.register(_write_curves)


def _write_curves() -> None:
    """Write the points of the evaluations after the last iteration, which Megatron leaves to a thread that ends with it."""
    writer = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_TENSORBOARD_WRITER", None)
    if hasattr(writer, "flush"):
        writer.flush()


class _BeforeMegatron:
    """The stand-ins are installed when ``megatron.core`` is imported for the first time."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "megatron.core" and "torch" in sys.modules:
            sys.meta_path.remove(self)
            _install()


sys.meta_path.insert(0, _BeforeMegatron())
