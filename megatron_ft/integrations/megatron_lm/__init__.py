"""Megatron-LM's own training loop, ``megatron.training``, with an unchanged script.

Each group is a Megatron world of its own. ``megatron-ft launch --megatron-lm SCRIPT -- ITS ARGUMENTS`` runs
:mod:`~megatron_ft.integrations.megatron_lm.script`; a script of one's own calls :func:`pretrain` in place of Megatron's.
"""

from __future__ import annotations

from typing import Any


def pretrain(*arguments: Any, **options: Any) -> None:
    """Call ``megatron.training.pretrain`` with these arguments, in a run. Call it where the script has not parsed its
    arguments yet, or start the script with ``launch --megatron-lm``, which needs no call.

    Raises:
        EngineError: this version of Megatron-LM lacks a function that is replaced, or an argument asks for what cannot be
            made fault-tolerant.
        ConfigError: arguments and config of the run differ.
    """
    from megatron_ft.integrations.megatron_lm import loop

    with loop.installed():
        from megatron.training import pretrain as of_megatron

        of_megatron(*arguments, **options)
