"""Names of processes in ``ps``, ``top`` and ``nvidia-smi``."""

from __future__ import annotations

import os

from megatron_ft.utils import lifeline

PREFIX = "megatron-ft: "
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""A variable of setproctitle: without it the library writes a long title over what /proc/PID/environ shows."""


def take(role: str, short: str) -> None:
    """Name this process ``megatron-ft: <role>`` in ``ps -f``, if setproctitle is installed, and ``short`` in ``ps``.

    The role is cut where it is longer than the process's command line, ``short`` after 15 characters.
    """
    before = os.environ.get(_KEEP_ENVIRONMENT)
    os.environ[_KEEP_ENVIRONMENT] = "1"
    try:
        from setproctitle import setproctitle

        setproctitle(PREFIX + os.fsencode(role).decode(errors="replace"))
    except Exception:
        pass  # a title is cosmetic, whatever the library meets
    finally:
        if before is None:
            del os.environ[_KEEP_ENVIRONMENT]
    lifeline.set_name(short)  # last: setproctitle sets it, too
