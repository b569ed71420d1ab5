"""Refuse torch's ``GradScaler``, and classes derived from it (FSDP1's ``ShardedGradScaler``), in the scripts of a run.

A scaled loss makes scaled gradients: nothing in them says so, and what unscales them (``scaler.step``) is not called,
because the session makes the step. Each group would also choose a scale of its own. The scaler itself is the only place
that knows, so it raises there, whoever calls it: a loop of one's own, a loss function, Accelerate.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

from megatron_ft.errors import EngineError

_REFUSED = (
    "torch.amp.GradScaler scales a loss, and the session would take the scaled gradients for the model's. Leave it out, "
    "or construct it with enabled=False: bf16 (torch.autocast with dtype=torch.bfloat16) needs no scale, and fp16 is a "
    "setting of session.deepspeed, which has its own"
)


def refuse() -> None:
    """Let every scaler that is enabled raise ``EngineError`` when it scales a loss, in this process, from now on."""
    GradScaler.__init_subclass__ = classmethod(_cover)  # type: ignore[assignment]  # those that are imported later
    kinds: list[type[GradScaler]] = [GradScaler]
    for kind in kinds:
        _cover(kind)
        kinds += kind.__subclasses__()


def _cover(kind: type[GradScaler]) -> None:
    plain = kind.__dict__.get("scale")  # a derived class may have its own
    if plain is not None and not hasattr(plain, "refuses"):
        kind.scale = _refusing(plain)  # type: ignore[method-assign]  # for all that call it


def _refusing(plain: Callable[..., Any]) -> Any:
    def scale(self: GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            raise EngineError(_REFUSED)
        return plain(self, outputs)

    scale.refuses = True  # type: ignore[attr-defined]
    return scale
