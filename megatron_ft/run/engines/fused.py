"""The fastest available AdamW and norms: NVIDIA's apex if it can be imported and a GPU is present, else torch's.

Their results are equal up to rounding, so all ranks of a run should use the same ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def adamw(parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW; ``options`` as ``torch.optim.AdamW`` takes them (lr, betas, eps, weight_decay)."""
    found = _apex("apex.optimizers", "FusedAdam")
    if found is not None:
        return found(parameters, adam_w_mode=True, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)


def layer_norm() -> type[nn.Module]:
    """Return the class to use as ``torch.nn.LayerNorm``."""
    return _apex("apex.normalization", "FusedLayerNorm") or nn.LayerNorm


def rms_norm() -> type[nn.Module]:
    """Return the class to use as ``torch.nn.RMSNorm``."""
    return _apex("apex.normalization", "FusedRMSNorm") or nn.RMSNorm


def which() -> dict[str, str]:
    """Return the implementations that :func:`adamw`, :func:`layer_norm` and :func:`rms_norm` choose here."""
    return {
        name: f"apex's {theirs}" if _apex(module, theirs) is not None else ours
        for name, module, theirs, ours in (
            ("AdamW", "apex.optimizers", "FusedAdam", "torch's, fused"),
            ("LayerNorm", "apex.normalization", "FusedLayerNorm", "torch's"),
            ("RMSNorm", "apex.normalization", "FusedRMSNorm", "torch's"),
        )
    }


def _apex(module: str, name: str) -> Any:
    """Return apex's class or function, or None: apex is missing or without its CUDA extensions, or there is no GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        importlib.import_module("amp_C")  # NVIDIA's; the package called apex on PyPI is something else
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
