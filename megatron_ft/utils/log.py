"""The messages of the library: loggers named after its modules, below the logger ``megatron_ft``.

By default each message is a line ``megatron_ft: ...``: warnings on standard error, the others on standard output. What
agents and launchers tell their caller (``utils.console.say``) is on standard error, too. A script that wants the messages
elsewhere replaces the handlers of ``logging.getLogger("megatron_ft")``, or makes it propagate; one that has given it
handlers before it imports ``megatron_ft`` keeps them.
"""

from __future__ import annotations

import logging
import sys

from megatron_ft.utils.terminal import put

LIBRARY, CONSOLE = "megatron_ft", "megatron_ft.utils.console"


class Lines(logging.Handler):
    """Writes lines to the standard streams of the moment. A terminal that has gone away, or a full disk, ends nothing."""

    def __init__(self, quiet: int) -> None:
        """Messages below the level ``quiet`` go to standard output."""
        super().__init__()
        self._quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        put(f"megatron_ft: {record.getMessage()}", sys.stdout if record.levelno < self._quiet else sys.stderr)


def set_up() -> None:
    """Give the loggers their handlers, unless they have some."""
    for name, quiet in ((LIBRARY, logging.WARNING), (CONSOLE, logging.NOTSET)):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(Lines(quiet))
            logger.propagate = False
            logger.setLevel(logger.level or logging.INFO)


def first_line(error: BaseException) -> str:
    """Return the line for people: torch appends a C++ stack to its messages."""
    return (str(error).splitlines() or [type(error).__name__])[0]
