"""Messages of launchers on stderr. A closed terminal or a full disk ends no process. Control characters are escaped,
because parts of a line may come from another host."""

from __future__ import annotations

import logging
import sys

from megatron_ft.utils.terminal import printable, put

_log = logging.getLogger(__name__)


def say(line: str) -> None:
    """Log a line: by default it is printed with the prefix "megatron_ft: "."""
    _log.info(printable(line))


def show(line: str) -> None:
    """Print a line without a prefix."""
    put(printable(line), sys.stderr)
