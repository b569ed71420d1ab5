"""Fault-tolerant LLM pre-training: when groups of ranks die, the interrupted step is kept and training continues.

    session = megatron_ft.init()
    engine = session.wrap(model, optimizer, loss_fn)
    for step in session.steps(1000):
        result = session.train_step(engine, dataset)

Start the script with ``megatron-ft launch``. See README.md, and docs/architecture.md for the terms and the protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ft.utils import log

__version__ = "0.2.0"
__all__ = ["Session", "init"]

log.set_up()

if TYPE_CHECKING:
    from megatron_ft.run.session import Session, init


def __getattr__(name: str) -> Any:
    """Import torch only when a training script asks for a public name: the command line works without it."""
    if name in __all__:
        from megatron_ft.utils import extras, torch_private

        with extras.needed():
            torch_private.check()
            from megatron_ft.run import session
        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
