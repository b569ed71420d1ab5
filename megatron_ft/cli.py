"""The command line ``megatron-ft``. A user's mistake is reported in one line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_ft import __version__
from megatron_ft.errors import ConfigError, FTError, LaunchError
from megatron_ft.utils import extras
from megatron_ft.utils.terminal import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    # Before torch is imported: it would log the retries of its sockets.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    options = _parse(arguments)
    from megatron_ft.utils import file_descriptors

    file_descriptors.raise_descriptors()  # child processes inherit the limit: agents, ranks, keepers
    try:
        _ensure_temporary_directory()
        with extras.needed():
            return options.run(options)
    except FTError as error:
        print(printable(f"megatron-ft {options.command}: {error}"), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 1
    except OSError as error:  # disk full, no permission: not a bug
        print(printable(f"megatron-ft {options.command}: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _ensure_temporary_directory() -> None:
    """Let temporary files, which this package and libraries make, be in memory where no directory for them can be
    written, as in a container with a read-only root. Raises ``LaunchError`` where there is no memory for them either."""
    import tempfile

    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        if not os.access("/dev/shm", os.W_OK):
            raise LaunchError(f"{error.strerror}, nor is /dev/shm one; set TMPDIR to a directory with space") from None
        os.environ["TMPDIR"] = "/dev/shm"


def run_and_exit() -> NoReturn:
    """The console script: run :func:`main` and end the process without the interpreter's shutdown.

    A daemon thread may still be inside a call to a control store that is gone. When such a thread returns to an interpreter
    that shuts down, C++ ends the process with SIGABRT ("terminate called without an active exception").
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk
            stream.flush()
    os._exit(code)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    name = next((word for word in words if not word.startswith("-")), "")
    try:
        with extras.needed():
            parser = _parser(name)
    except ConfigError as error:
        _parser("").error(str(error))
    if name == "burn-in":
        parser.error(
            "burn-in is a batch script now: sbatch slurm/chaos.sbatch (megatron-ft examples --copy DIR has it)"
        )
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        script = getattr(options, "script", None)
        hint = "" if script is None else f"; arguments of the script come after --: {script} -- {' '.join(unknown)}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


_COMMANDS = """\
examples:
  megatron-ft doctor                 check this machine
  megatron-ft examples --copy ft     documents, training scripts, sbatch files
  megatron-ft launch --groups 4 --run-dir runs/a train.py -- --steps 100
  megatron-ft status runs/a          where the run stands
  megatron-ft COMMAND --help         options, examples and exit codes of it"""
_OTHER_CODES = "exit codes: 0 done; 1 failed; 2 refused: options, files, or a library that is missing"
_RUN_CODES = """\
exit codes:
  0      all steps are done, and with checkpoints the one after the last step is complete
  1      the script raised an exception, or ended before its steps did
  2      refused before the start: options, config, data, or a run directory that another run has
  3      the run stopped by itself: fewer than min_groups groups are left, say
  4      the control store is gone
  5      the last group that was left has left in order
  7      no group is left, or too few for the policy (a wipe-out): start again
  8      all steps are done, but the last checkpoint or the script's end was not
  10     an invariant is broken: the groups' states differ, say; start again from a checkpoint
  128+n  stopped before the last step by signal n"""


def _parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. ``only``: the one whose options it has; the others have their names."""
    parser = argparse.ArgumentParser(
        prog="megatron-ft",
        description="Fault-tolerant LLM pre-training: when ranks die,\nthe interrupted step is kept and training goes on.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *examples: str, codes: str = _OTHER_CODES, module: str = "") -> None:
        """``text`` says what it does, ``examples`` are arguments of calls. ``module`` has its ``options`` and ``run``;
        default: the one of ``commands`` that is called after it."""
        lines = ["examples:", *(f"  megatron-ft {name} {example}" for example in examples), "", codes]
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="\n".join(lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only in (None, name):
            importlib.import_module(f"megatron_ft.{module or f'commands.{name}_command'}").options(added)

    command(
        "plan",
        "recommend a policy, redundancy and checkpoint period for a cluster",
        "--preset llama3-16k",
        "--gpus 1024 --gpus-per-group 32 --node-mtbf-hours 6000 --step-s 8",
        "--measured runs/a --gpus 1024 --out ft.json",
    )
    command(
        "simulate",
        "simulate a whole training run with failures for each policy",
        "--preset llama3-16k --trials 5",
        "--preset lab-64 --policy stacked_quota,restart",
        "--like runs/a",
    )
    command(
        "prepare",
        "tokenize text into a dataset of packed samples",
        "--out data/sotu",
        "--out data/mine --text books.jsonl web.parquet --vocab-size 32000",
        "--out data/web --text web.jsonl.gz --tokenizer gpt2/tokenizer.json --workers 32",
    )
    command(
        "launch",
        "start a fault-tolerant run on this node",
        "--groups 4 --run-dir runs/a train.py -- --steps 100",
        "--groups 8 --config ds_config.json --ssh --hostfile hosts --port 29500 --run-dir /shared/a train.py",
        codes=_RUN_CODES,
    )
    command(
        "join",
        "add groups to a live run, or a spare host, from this node",
        "/shared/a --groups 2",
        "/shared/a --spare",
        codes=_RUN_CODES,
    )
    command(
        "leave",
        "have a group of a live run leave in order, for maintenance",
        '/shared/a 3 --why "new disk"',
    )
    command("stop", "tell a live run to save and to end", '/shared/a --why "maintenance"')
    command(
        "supervise",
        "in a Slurm job: launch on all nodes, and replace agents that end",
        "launch --groups 8 --spare-hosts 1 --run-dir /shared/a train.py -- --steps 1000",
        codes=f"{_RUN_CODES}\n  75     the job is queued again, and the run goes on in it",
    )
    command(
        "inject",
        "inject faults of a schedule, or drawn ones, into a live run",
        "runs/a faults.yaml",
        "runs/a --mix 5 --every-s 20",
        "faults.yaml --dry-run --groups 4",
    )
    command(
        "report",
        "show tables and pictures of a run",
        "runs/a",
        "runs/a --reference runs/clean",
        "runs/a --json",
    )
    command(
        "status",
        "show where a run stands; on a terminal until it ends",
        "runs/a",
    )
    command(
        "checkpoint",
        "list or check the checkpoints of a run",
        "list runs/a/checkpoints",
        "verify runs/a/checkpoints",
    )
    command(
        "export",
        "write the model of a run's checkpoint for other programs",
        "runs/a --format hf --out llama",
        "/shared/ckpt --format megatron --step 1000 --out model",
    )
    command(
        "doctor",
        "check this machine, or all hosts of a run, before training",
        "",
        "--hosts 4 --directory /shared",
        "--deterministic train.py --config ds_config.json -- --data data/sotu",
    )
    command(
        "qualify",
        "show on these machines, with real processes and faults, what holds there",
        "",
        "--gpus 2 --json qualify.json",
        "--hosts 4 --host-rank 0 --store node1:29400 --directory /shared",
        codes="exit codes: 0 nothing failed; 1 a check failed; 2 refused: options, hosts or a library that is missing",
    )
    command(
        "replay",
        "compute a committed step again, and compare it with the record",
        "runs/a --step 120",
        "runs/a --step 120 --microbatch 3.0",
    )
    command(
        "examples",
        "list the example scripts, sbatch files and documents, or copy them",
        "",
        "--copy ft",
        module="utils.shipped_files",
    )
    command(
        "completion",
        "print a shell's tab completion of this command",
        "bash > ~/.local/share/bash-completion/completions/megatron-ft",
        'zsh > "${fpath[1]}/_megatron-ft"',
        module="cli",
    )
    return parser


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what the shell reads. Returns the exit code."""
    import shtab

    parser = _parser()
    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab is told
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All options and arguments, those of commands included."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


if __name__ == "__main__":
    run_and_exit()
