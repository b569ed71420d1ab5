"""The command line ``megatron-ft``. A user's mistake is reported in one line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_ft import __version__
from megatron_ft.errors import ConfigError, FTError, LaunchError
from megatron_ft.utils import extras, lifeline
from megatron_ft.utils.terminal import printable

if TYPE_CHECKING:
    from megatron_ft.agent import join
    from megatron_ft.agent.forkserver import ForkServer
    from megatron_ft.config.schema import RunConfig


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


Options = Callable[[argparse.ArgumentParser], None]


def _of(module: str) -> Options:
    """Return what adds the options of a command that has a module of its own; it is imported for this command only."""
    return lambda parser: importlib.import_module(f"megatron_ft.{module}").options(parser)


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

    def command(options: Options, name: str, text: str, *examples: str, codes: str = _OTHER_CODES) -> None:
        """``options`` adds those of the command, ``text`` says what it does, ``examples`` are arguments of calls."""
        lines = ["examples:", *(f"  megatron-ft {name} {example}" for example in examples), "", codes]
        added = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="\n".join(lines),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only in (None, name):
            options(added)

    command(
        _of("planning.plan_command"),
        "plan",
        "recommend a policy, redundancy and checkpoint period for a cluster",
        "--preset llama3-16k",
        "--gpus 1024 --gpus-per-group 32 --node-mtbf-hours 6000 --step-s 8",
        "--measured runs/a --gpus 1024 --out ft.json",
    )
    command(
        _of("simulation.training.simulate_command"),
        "simulate",
        "simulate a whole training run with failures for each policy",
        "--preset llama3-16k --trials 5",
        "--preset lab-64 --policy stacked_quota,restart --trace failures.csv",
        "--like runs/a",
    )
    command(
        _add_prepare,
        "prepare",
        "tokenize text into a dataset of packed samples",
        "--out data/sotu",
        "--out data/mine --text books.jsonl web.parquet --vocab-size 32000",
        "--out data/web --text web.jsonl.gz --tokenizer gpt2/tokenizer.json --workers 32",
    )
    command(
        _add_launch,
        "launch",
        "start a fault-tolerant run on this node",
        "--groups 4 --run-dir runs/a train.py -- --steps 100",
        "--groups 8 --config ds_config.json --ssh --hostfile hosts --port 29500 --run-dir /shared/a train.py",
        codes=_RUN_CODES,
    )
    command(
        _add_join,
        "join",
        "add groups to a live run, or a spare host, from this node",
        "/shared/a --groups 2",
        "/shared/a --spare",
        codes=_RUN_CODES,
    )
    command(
        _add_leave,
        "leave",
        "have a group of a live run leave in order, for maintenance",
        '/shared/a 3 --why "new disk"',
    )
    command(_add_stop, "stop", "tell a live run to save and to end", '/shared/a --why "maintenance"')
    command(
        _add_supervise,
        "supervise",
        "in a Slurm job: launch on all nodes, and replace agents that end",
        "launch --groups 8 --spare-hosts 1 --run-dir /shared/a train.py -- --steps 1000",
        codes=f"{_RUN_CODES}\n  75     the job is queued again, and the run goes on in it",
    )
    command(
        _of("faults.inject_command"),
        "inject",
        "inject faults of a schedule, or drawn ones, into a live run",
        "runs/a faults.yaml",
        "runs/a --mix 5 --every-s 20",
        "faults.yaml --dry-run --groups 4",
    )
    command(
        _of("report.report_command"),
        "report",
        "show tables and pictures of a run",
        "runs/a",
        "runs/a --reference runs/clean",
        "runs/a --json",
    )
    command(
        _of("report.status_command"),
        "status",
        "show where a run stands; on a terminal until it ends",
        "runs/a",
        "runs/a --once",
    )
    command(
        _of("report.checkpoint_command"),
        "checkpoint",
        "list or check the checkpoints of a run",
        "list runs/a/checkpoints",
        "verify runs/a/checkpoints",
    )
    command(
        _of("report.export_command"),
        "export",
        "write the model of a run's checkpoint for other programs",
        "runs/a --format hf --out llama",
        "/shared/ckpt --format megatron --step 1000 --out model",
    )
    command(
        _of("doctor.doctor_command"),
        "doctor",
        "check this machine, or all hosts of a run, before training",
        "",
        "--hosts 4 --directory /shared",
        "--deterministic train.py --config ds_config.json -- --data data/sotu",
    )
    command(
        _of("qualify.qualify_command"),
        "qualify",
        "show on these machines, with real processes and faults, what holds there",
        "",
        "--gpus 2 --json qualify.json",
        "--hosts 4 --host-rank 0 --store node1:29400 --directory /shared",
        codes="exit codes: 0 nothing failed; 1 a check failed; 2 refused: options, hosts or a library that is missing",
    )
    command(
        _of("audit.step_replay"),
        "replay",
        "compute a committed step again, and compare it with the record",
        "runs/a --step 120",
        "runs/a --step 120 --microbatch 3.0",
    )
    command(
        _of("utils.shipped_files"),
        "examples",
        "list the example scripts, sbatch files and documents, or copy them",
        "",
        "--copy ft",
    )
    command(
        _add_completion,
        "completion",
        "print a shell's tab completion of this command",
        "bash > ~/.local/share/bash-completion/completions/megatron-ft",
        'zsh > "${fpath[1]}/_megatron-ft"',
    )
    return parser


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
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


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the prepared dataset")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="txt or jsonl (also .gz, .zst) or parquet files, or directories written by save_to_disk (default: State of the "
        "Union addresses)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of token ids of a tokenizer trained on the text (default: 4096)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE_OR_DIR",
        help="a tokenizer of yours in its place: Hugging Face's tokenizer.json or a sentencepiece .model",
    )
    parser.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="its token that ends a document (default: <|endoftext|> or another usual name)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: one for each core)")
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from megatron_ft import data

    data.prepare(
        options.out,
        options.text,
        options.vocab_size,
        tokenizer=options.tokenizer,
        eod_token=options.eod_token,
        workers=options.workers,
    )
    return 0


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, required=True, metavar="N", help="number of groups at the start (N)")
    parser.add_argument(
        "--ranks-per-group",
        type=int,
        metavar="M",
        help="number of ranks of a group (default: pipeline stages x slices of the config)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="DeepSpeed-style JSON file (default: all settings have their defaults)",
    )
    parser.add_argument(
        "--megatron",
        action="store_true",
        help="take sizes, batch and clipping from the script's arguments, named as Megatron-LM names them",
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="directory of the run record")
    parser.add_argument(
        "--port", type=int, default=0, metavar="P", help="port of the control store (default: a free one)"
    )
    hosts = parser.add_argument_group("several hosts", "the same command on each of them, with its own --host-rank")
    hosts.add_argument("--hosts", type=int, metavar="H", help="number of hosts (default: 1)")
    hosts.add_argument(
        "--host-rank", type=int, metavar="K", help="number of this host, from 0; host 0 has the control store"
    )
    hosts.add_argument(
        "--store",
        metavar="HOST:PORT",
        help="address of host 0 and a free port on it; or embedded, etcd://...",
    )
    hosts.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="in place of these: file with lines NAME slots=RANKS; needs --port or --job-id",
    )
    hosts.add_argument(
        "--spare-hosts",
        type=int,
        default=0,
        metavar="S",
        help="number of hosts, the last ones, that replace lost hosts",
    )
    hosts.add_argument(
        "--job-id", metavar="ID", help="new name of the run, equal on all hosts: with etcd, or in place of --store"
    )
    hosts.add_argument(
        "--address", metavar="ADDR", help="address by which other hosts reach this host (default: found)"
    )
    ssh = parser.add_argument_group("over ssh", "one command, on any machine, for all hosts of a --hostfile")
    ssh.add_argument("--ssh", action="store_true", help="start an agent on each host, and follow the run")
    ssh.add_argument(
        "--ssh-command", default="ssh", metavar="CMD", help="ssh and its options, as one argument (default: ssh)"
    )
    ssh.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME",
        help="pass this variable to all hosts; or NAME=VALUE, or @FILE with such lines",
    )
    parser.add_argument(
        "--failure-domains",
        type=_names,
        metavar="NAMES",
        help="rack or switch of each group, unless the config has them",
    )
    parser.add_argument(
        "--track", type=_names, default=(), metavar="NAMES", help="tensorboard, wandb or both (pip extra 'track')"
    )
    parser.add_argument(
        "--tee",
        type=_tee,
        default="0",
        metavar="RANK",
        help="show what this rank writes; or all, or none (default: 0). Each rank's output is in RUN_DIR/logs",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run in the run directory")
    parser.add_argument("--private", action="store_true", help="no other user may read the run directory (mode 0700)")
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        metavar="WHEN",
        default="auto",
        help="auto: continue from the newest checkpoint, if there is one; never: refuse to start if there is one",
    )
    _add_preload(parser)
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs="*", help="arguments of the script, after --")
    parser.set_defaults(run=_launch)


def _megatron(options: argparse.Namespace) -> Sequence[str] | None:
    """Return the arguments of the script if settings are to be taken from them."""
    return options.arguments if options.megatron else None


def _add_preload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preload", type=_names, default=(), metavar="NAMES", help="modules to import once for all ranks"
    )
    parser.add_argument("--no-preload", action="store_true", help="each rank imports torch itself; no rank is forked")


def _launch(options: argparse.Namespace) -> int:
    lifeline.ignore_save_signals()  # until the run has begun, there is nothing to save
    from megatron_ft.agent import job_restore
    from megatron_ft.config.schema import EMBEDDED
    from megatron_ft.launchers import host_place, hostfile

    run = job_restore.config(
        options.config, options.groups, options.ranks_per_group, options.failure_domains, _megatron(options)
    )
    run = host_place.with_store(options, run)
    options.target = None
    if options.ssh:
        from megatron_ft.launchers.ssh import launcher
        from megatron_ft.report import follow

        return launcher.launch(launcher.options_of(options, run), lambda: follow.shown(options.groups, options.run_dir))
    if options.hostfile is not None:
        found = host_place.from_hostfile(options, run.fault_tolerance.store == EMBEDDED, options.job_id is not None)
        hostfile.check(options.hostfile, found, run, options.spare_hosts)
    elif options.hosts is None and options.host_rank is None:
        host_place.from_surroundings(options, run.fault_tolerance.store == EMBEDDED)
    host_place.check_rank(options)
    host_place.check_address(options)
    if options.spare_hosts:
        from megatron_ft.agent import join

        options.hosts, spare = join.without_spares(options.hosts or 1, options.host_rank or 0, options.spare_hosts)
        if spare:
            running = join.await_launch(options.run_dir, options.store, options.job_id, run)
            return _join_as(options, running, 0)
    job = job_restore.WholeJob(run, options.hosts or 1)
    here = max(1, run.groups * run.ranks_per_group // max(1, options.hosts or 1))
    while True:
        with _forks(options, here) as forks:  # before torch is imported here: both take as long
            code = _launch_from(options, run, forks)
        if not job.again(code):
            return code


@contextlib.contextmanager
def _forks(options: argparse.Namespace, ranks: int) -> Iterator[ForkServer | None]:
    """The process that forks the ranks of this host, for the block; None with ``--no-preload``."""
    if options.no_preload:
        yield None
        return
    from megatron_ft.agent import forkserver

    with contextlib.closing(forkserver.ForkServer(forkserver.common_environment(ranks), options.preload)) as forks:
        yield forks


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="of the run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--groups", type=int, metavar="K", help="number of groups to add on this node")
    what.add_argument("--spare", action="store_true", help="wait for a host that is lost, and take its groups over")
    parser.add_argument("--address", metavar="ADDR", help="by which others reach this host (default: found)")
    parser.add_argument("--entered-fd", type=int, metavar="FD", help=argparse.SUPPRESS)
    _add_preload(parser)
    parser.set_defaults(run=_join)


def _join(options: argparse.Namespace) -> int:
    lifeline.ignore_save_signals()
    from megatron_ft.agent import join

    return _join_as(options, join.find(options.run_dir), options.groups or 0, options.entered_fd)


def _join_as(options: argparse.Namespace, running: join.Running, groups: int, entered_fd: int | None = None) -> int:
    """With a number of groups, or as a spare host. ``entered_fd``: takes a byte once the host has its number."""
    from megatron_ft.agent import join
    from megatron_ft.agent.node_agent import Agent, LaunchOptions

    newcomer = join.enter(running, groups, options.address)
    if entered_fd is not None:
        os.write(entered_fd, b"1")
        os.close(entered_fd)
    with _forks(options, join.ranks_here(newcomer)) as forks:
        os.chdir(running.directory)
        script, *arguments = running.command
        agent = Agent(
            LaunchOptions(
                config=running.config,
                run_dir=running.run_dir,
                script=Path(script),
                arguments=arguments,
                newcomer=newcomer,
            ),
            forks,
        )
        return agent.run()


def _launch_from(options: argparse.Namespace, run: RunConfig, forks: ForkServer | None) -> int:
    from megatron_ft.agent.node_agent import Agent, LaunchOptions
    from megatron_ft.report import follow, tracker

    tracker.check_trackers(options.track)
    agent = Agent(
        LaunchOptions(
            config=run,
            run_dir=options.run_dir,
            script=options.script,
            arguments=options.arguments,
            port=options.port,
            hosts=1 if options.hosts is None else options.hosts,
            host_rank=options.host_rank or 0,
            store=options.store,
            address=options.address,
            job_id=options.job_id,
            target=options.target,
            track=options.track,
            overwrite=options.overwrite,
            private=options.private,
            resume=options.resume,
        ),
        forks,
    )
    tee = options.tee if not options.host_rank else follow.NONE  # one host shows what one of all ranks writes
    with follow.shown(options.groups, options.run_dir, run.ranks_per_group, tee):
        return agent.run()


def _add_leave(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("group", type=int, help="its number")
    parser.add_argument("--why", default="asked by megatron-ft leave", metavar="TEXT", help="for the record")
    parser.add_argument(
        "--patience-s", type=float, default=600.0, metavar="S", help="how long its answer is waited for (default: 600)"
    )
    parser.set_defaults(run=_leave)


def _leave(options: argparse.Namespace) -> int:
    from megatron_ft.agent import operator_requests

    operator_requests.leave(options.run_dir, options.group, options.why, options.patience_s)
    return 0


def _add_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("--why", default="asked by megatron-ft stop", metavar="TEXT", help="for the record")
    parser.set_defaults(run=_stop)


def _stop(options: argparse.Namespace) -> int:
    from megatron_ft.agent import operator_requests

    operator_requests.stop(options.run_dir, options.why)
    return 0


def _add_supervise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop-before-s",
        type=float,
        default=300.0,
        metavar="S",
        help="save and stop before the time limit (default: 300)",
    )
    parser.add_argument(
        "--failures-per-node", type=int, default=3, metavar="N", help="drain a node after N ended agents (default: 3)"
    )
    parser.add_argument("--second", action="store_true", help="wait until the first supervisor is lost (internal)")
    parser.add_argument("--array", action="store_true", help="run as an element of an array job, which has one node")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help="launch and its options, without those for hosts")
    parser.set_defaults(run=_supervise)


def _of_job(options: argparse.Namespace) -> argparse.Namespace:
    """Parses the ``launch`` command of a job. Adds ``words`` (its arguments) and ``settings`` (the configuration)."""
    from megatron_ft.agent import job_restore
    from megatron_ft.launchers import host_place

    command = options.launch[1:] if options.launch[:1] == ["--"] else options.launch
    if command[:1] != ["launch"]:
        raise LaunchError("the launch command is missing; write: megatron-ft supervise [OPTIONS] launch --groups N ...")
    asked = _parser("launch").parse_args(command)
    run = job_restore.config(asked.config, asked.groups, asked.ranks_per_group, megatron=_megatron(asked))
    asked.settings = host_place.with_store(asked, run)
    if asked.hosts is not None or asked.host_rank is not None or asked.store or asked.hostfile or asked.job_id:
        raise LaunchError("Slurm provides the hosts; leave --hosts, --host-rank, --store, --hostfile and --job-id out")
    asked.words = command[1:]
    return asked


def _supervise(options: argparse.Namespace) -> int:
    from megatron_ft.launchers import supervisor_loop
    from megatron_ft.launchers.slurm import supervisor

    asked = _of_job(options)
    run = asked.settings
    if options.array:
        from megatron_ft.launchers.slurm import job_array

        limits = job_array.limits(
            run.fault_tolerance, job_array.place(os.environ), asked.spare_hosts, options.failures_per_node
        )
        return job_array.ArrayTask(
            asked.words, asked.run_dir.resolve(), asked.spare_hosts, limits, job_array.place(os.environ)
        ).run()
    return supervisor.Supervisor(
        supervisor.Options(
            launch=asked.words,
            run=run,
            run_dir=asked.run_dir.resolve(),
            spares=asked.spare_hosts,
            limits=supervisor_loop.limits(
                run.fault_tolerance, per_node=options.failures_per_node, stop_before_s=options.stop_before_s
            ),
            waits=options.second,
        )
    ).run()


def _tee(text: str) -> str:
    if text not in ("all", "none") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a rank; give one, all or none")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    run_and_exit()
