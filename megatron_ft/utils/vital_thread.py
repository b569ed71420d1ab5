"""Threads whose unexpected end is a fatal error of their rank, and the file in which a rank leaves what ended it.

Python only prints the traceback of an exception that ends a thread, and the process goes on. A rank whose listening thread
is gone is deaf, and every other group would wait for it until a timeout. So such a rank ends, and is masked and started
again as any lost one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron_ft.errors import FTError
from megatron_ft.utils import shared_file

ERROR_VARIABLE = "MEGATRON_FT_ERROR_FILE"
"""The environment variable with the path of that file. Only ranks have it; their agent reads the file."""


class VitalThread(threading.Thread):
    """A daemon thread. ``failed`` is called, in this thread, with an exception that ``target`` does not handle."""

    def __init__(
        self,
        target: Callable[..., None],
        name: str,
        args: tuple = (),
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._failed = failed or end_rank

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:  # SystemExit, too: it would end this thread only
            self._failed(error)


def end_rank(error: BaseException) -> None:
    """End this rank at once, because ``error`` has ended the calling thread. In any other process it is raised again, so
    that its traceback is printed."""
    if ERROR_VARIABLE not in os.environ:
        raise error
    if isinstance(error, FTError):
        print(f"megatron_ft: {error}", file=sys.stderr)
        leave_error(str(error))
    else:
        traceback.print_exception(error)
        leave_error(f"thread {threading.current_thread().name} {described(error)}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, FTError) else 1)


def described(error: BaseException) -> str:
    """Return "raised TYPE: MESSAGE", with the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno}, in {place.name})"


def leave_error(message: str, microbatch: str | None = None, path: Path | None = None) -> None:
    """Write why a rank ends, for its agent.

    Args:
        message: the reason.
        microbatch: the one in whose computation it ends.
        path: the file of that rank; by default that of this process, if this process is a rank.
    """
    if path is None and (own := os.environ.get(ERROR_VARIABLE)):
        path = Path(own)
    if path is not None:
        said = json.dumps({"message": " ".join(message.split()), "microbatch": microbatch})
        with contextlib.suppress(OSError):
            shared_file.write(path, said)
