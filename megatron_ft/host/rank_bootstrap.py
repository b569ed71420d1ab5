"""The entry point of a rank: ``python -m megatron_ft.host.rank_bootstrap SCRIPT ARGUMENTS``, or ``-m MODULE ARGUMENTS``.

It ties the rank's life to its agent's, runs the script or module as ``__main__``, and turns whatever ends it into an
exit code and a one-line error file that the agent reads. It leaves with ``os._exit``: torch's worker threads can abort at
interpreter exit after success.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import traceback
from multiprocessing import active_children, util
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_ft.config import rank_command, rank_env
from megatron_ft.errors import FTError
from megatron_ft.host import forkserver
from megatron_ft.host.forkserver import AGENT_VARIABLE
from megatron_ft.utils import lifeline, process_name, vital_thread

_RANK_ENDED = signal.SIGRTMAX - 3
"""A signal that nothing else sends."""


def main() -> None:
    """Run the training script in this process, as a rank."""
    if sys.argv[1:2] == [forkserver.SERVE]:
        forkserver.serve(sys.argv[2:])  # only forked ranks return from here
    agent = os.environ.get(AGENT_VARIABLE)
    lifeline.end_with(int(agent) if agent else None)  # an orphan would train on without an agent to report its death
    _end_descendants_too()
    sys.stdout, sys.stderr = _unfailing(1), _unfailing(2)
    # A rank is usually inside a collective, where Python's own handler for Ctrl-C would only run after it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = sys.argv[1:]
    rank_env.name_process(rank_command.shown(command))
    code = _run(command)
    if not code:
        # What Python does at its end, which this process does not reach: managers are shut down, and processes of the
        # script are waited for, one that writes the final model, say.
        util._run_finalizers(0)  # type: ignore[attr-defined]
        for process in active_children():
            if process.daemon:
                process.kill()  # Python's SIGTERM does not end one that has inherited this process's handler
        util._exit_function()  # type: ignore[attr-defined]
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(command: list[str]) -> int:
    """Run the command. This is the outermost loop of a rank, so it converts every exception."""
    try:
        _execute(command)
    except FTError as error:
        print(f"megatron_ft: {error}", file=sys.stderr)
        vital_thread.leave_error(str(error))
        return error.exit_code
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        vital_thread.leave_error(str(error.code))
        return 1
    except BaseException as error:
        file = rank_command.file_of(command)
        traceback.print_exception(error.with_traceback(_of_script(error, file)))
        name = rank_command.shown(command)
        what = f"{name} raised {type(error).__name__}: {error}{_where(error, file)}{_remedy(error)}"
        vital_thread.leave_error(what, getattr(error, "microbatch", None))
        return 1
    return 0


def _end_descendants_too() -> None:
    """Start a process that ends this one's group when this one has ended. The agent does the same for a rank that ends; here
    the agent may be the one that was killed."""
    rank = os.getpid()
    if os.fork():
        return
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
    ):  # some managers of clusters signal every process of a job
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [_RANK_ENDED])
    process_name.take(f"ends what rank process {rank} has started", "ft-ends")
    lifeline.end_with(rank, _RANK_ENDED)
    signal.sigwait([_RANK_ENDED])
    os.killpg(0, signal.SIGKILL)


def _execute(command: list[str]) -> None:
    """Run the script or module, as ``python SCRIPT ARGUMENTS`` and ``python -m MODULE ARGUMENTS`` do."""
    if command[0] == rank_command.MODULE:
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


class _Unfailing(io.FileIO):
    """A file descriptor to which a write never fails: a log on a full disk is no reason to lose a group."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _unfailing(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Unfailing(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True, line_buffering=True)


def _of_script(error: BaseException, script: str | None) -> TracebackType | None:
    """Return the traceback from the script's own frame on, as if the script had been started without this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _where(error: BaseException, script: str | None) -> str:
    """Return the last line of the user's own script in the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    if isinstance(error, SyntaxError):
        return ""  # its text has the line
    return f" (line {frames[-1].lineno})" if frames else ""


def _remedy(error: BaseException) -> str:
    """Return what to do where a library looked for a world of torch.distributed that the script has not made."""
    if "MASTER_ADDR expected" not in str(error):
        return ""
    return (
        "; call session.init_distributed() after megatron_ft.init() and before anything that looks for a world "
        "(TrainingArguments, Accelerator, init_process_group)"
    )


if __name__ == "__main__":
    main()
