"""The command ``megatron-ft launch``: a run on this host, or over ssh."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.config import rank_command
from megatron_ft.errors import LaunchError
from megatron_ft.utils import lifeline
from megatron_ft.utils.console import say

if TYPE_CHECKING:
    from megatron_ft.config.schema import RunConfig
    from megatron_ft.host import join
    from megatron_ft.host.forkserver import ForkServer


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft launch``."""
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
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--megatron",
        action="store_true",
        help="take sizes, batch and clipping from the script's arguments, named as Megatron-LM names them",
    )
    loop.add_argument(
        "--megatron-lm",
        action="store_true",
        help="the script is one of Megatron-LM, unchanged: its training loop and arguments are used",
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
        metavar="RANKS",
        help="show what these ranks write, 0,3 say; or all, or none (default: 0, with --megatron-lm the first and last "
        "one of the writer's group). Each rank's output is in RUN_DIR/logs",
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
    preload_options(parser)
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module, which runs as python -m runs it"
    )
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs="*", help="arguments of the script, after --")
    parser.set_defaults(run=run)


def preload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is imported once for all ranks."""
    parser.add_argument(
        "--preload", type=_names, default=(), metavar="NAMES", help="modules to import once for all ranks"
    )
    parser.add_argument("--no-preload", action="store_true", help="each rank imports torch itself; no rank is forked")


def run(options: argparse.Namespace) -> int:
    """Run this host's part of the job. Returns the exit code; raises ``FTError``."""
    lifeline.ignore_save_signals()  # until the run has begun, there is nothing to save
    from megatron_ft.cluster.launchers import host_place, hostfile
    from megatron_ft.config.schema import EMBEDDED
    from megatron_ft.host import job_restore

    run = host_place.with_store(options, settings(options))
    options.target = None
    if options.ssh:
        from megatron_ft.cluster.launchers.ssh import launcher

        return launcher.launch(options, run, lambda: _shown(options, run))
    if options.hostfile is not None:
        found = host_place.from_hostfile(options, run.fault_tolerance.store == EMBEDDED, options.job_id is not None)
        hostfile.check(options.hostfile, found, run, options.spare_hosts)
    elif options.hosts is None and options.host_rank is None:
        host_place.from_surroundings(options, run.fault_tolerance.store == EMBEDDED)
    host_place.check_rank(options)
    host_place.check_address(options)
    if options.spare_hosts:
        from megatron_ft.host import join

        options.hosts, spare = join.without_spares(options.hosts or 1, options.host_rank or 0, options.spare_hosts)
        if spare:
            running = join.await_launch(options.run_dir, options.store, options.job_id, run)
            return join_as(options, running, 0)
    if options.megatron_lm:
        from megatron_ft.config import megatron_lm_arguments

        where = run.fault_tolerance.checkpoint.script_directory
        if last := megatron_lm_arguments.done(options.arguments, where):
            say(f"all iterations are done: {where} has the checkpoint of iteration {last}")
            return 0
        if not options.host_rank:
            megatron_lm_arguments.check_directory(options.arguments)
            for note in megatron_lm_arguments.changed(options.arguments).notes:
                say(note)
    job = job_restore.WholeJob(run, options.hosts or 1)
    here = max(1, run.groups * run.ranks_per_group // max(1, options.hosts or 1))
    while True:
        with forks_of(options, here) as forks:  # before torch is imported here: both take as long
            code = _launch_from(options, run, forks)
        if not job.again(code):
            return code


def settings(options: argparse.Namespace) -> RunConfig:
    """Return the config that the options of ``launch`` describe. Raises ``FTError``."""
    from megatron_ft.host import job_restore

    if options.module and options.megatron_lm:
        raise LaunchError("-m and --megatron-lm cannot be combined; give the path of Megatron-LM's script")
    return job_restore.config(
        options.config,
        options.groups,
        options.ranks_per_group,
        options.failure_domains,
        options.arguments if options.megatron or options.megatron_lm else None,
        options.megatron_lm,
    )


@contextlib.contextmanager
def forks_of(options: argparse.Namespace, ranks: int) -> Iterator[ForkServer | None]:
    """The process that forks the ranks of this host, for the block; None with ``--no-preload``."""
    if options.no_preload:
        yield None
        return
    from megatron_ft.host import forkserver

    with contextlib.closing(forkserver.ForkServer(forkserver.common_environment(ranks), options.preload)) as forks:
        yield forks


def join_as(options: argparse.Namespace, running: join.Running, groups: int, entered_fd: int | None = None) -> int:
    """With a number of groups, or as a spare host. ``entered_fd``: takes a byte once the host has its number."""
    from megatron_ft.host import join
    from megatron_ft.host.node_agent import Agent, LaunchOptions

    newcomer = join.enter(running, groups, options.address)
    if entered_fd is not None:
        os.write(entered_fd, b"1")
        os.close(entered_fd)
    os.chdir(running.directory)  # before ranks are forked from a process that is there, too
    with forks_of(options, join.ranks_here(newcomer)) as forks:
        agent = Agent(
            LaunchOptions(
                config=running.config,
                run_dir=running.run_dir,
                command=running.command,
                newcomer=newcomer,
            ),
            forks,
        )
        return agent.run()


def _launch_from(options: argparse.Namespace, run: RunConfig, forks: ForkServer | None) -> int:
    from megatron_ft.host import tracker
    from megatron_ft.host.node_agent import Agent, LaunchOptions

    track = (*options.track, *(tracker.asked_for(options.arguments) if options.megatron_lm else ()))
    tracker.check_trackers(track)
    agent = Agent(
        LaunchOptions(
            config=run,
            run_dir=options.run_dir,
            command=rank_command.of(
                str(options.script), options.arguments, module=options.module, megatron_lm=options.megatron_lm
            ),
            port=options.port,
            hosts=1 if options.hosts is None else options.hosts,
            host_rank=options.host_rank or 0,
            store=options.store,
            address=options.address,
            job_id=options.job_id,
            target=options.target,
            track=track,
            overwrite=options.overwrite,
            private=options.private,
            resume=options.resume,
        ),
        forks,
    )
    with _shown(options, run):
        return agent.run()


def _shown(options: argparse.Namespace, run: RunConfig) -> contextlib.AbstractContextManager[None]:
    """Return the context in which the run is shown. Megatron-LM logs losses at its last rank, all other lines at its first;
    each group says the same, so those of the writer's group are shown."""
    from megatron_ft.record import follow

    follows = options.megatron_lm and options.tee is None
    tee = options.tee or (f"0,{run.ranks_per_group - 1}" if follows else "0")
    tee = tee if not options.host_rank else follow.NONE  # one host shows what ranks of all hosts write
    return follow.shown(options.groups, options.run_dir, run.ranks_per_group, tee, follows)


def _tee(text: str) -> str:
    if text not in ("all", "none") and not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a rank; give one or several as 0,3, all or none")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
