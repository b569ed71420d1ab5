"""The commands of ``megatron-ft``. A user's mistake gets one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft import __version__
from megatron_ft.burnin import words
from megatron_ft.errors import FTError

if TYPE_CHECKING:
    from megatron_ft.config import RunConfig
    from megatron_ft.launch import join
    from megatron_ft.launch.forkserver import ForkServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    # Before torch is imported: its sockets' retries are not for the user's eyes.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except FTError as error:
        print(f"megatron-ft {options.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 1
    except OSError as error:  # disk full, no permission: the machine's trouble, not a bug
        print(f"megatron-ft {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-ft", description="Fault-tolerant LLM pre-training.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands.add_parser("plan", help="which policy, redundancy and checkpoint period a cluster needs, and why"))
    _add_simulate(commands.add_parser("simulate", help="play a whole training run with failures under each policy"))
    _add_prepare(commands.add_parser("prepare", help="corpus -> tokenizer -> packed samples"))
    _add_launch(commands.add_parser("launch", help="start a fault-tolerant run on this node"))
    _add_join(commands.add_parser("join", help="add groups to a live run, or a spare host, from this node"))
    _add_leave(commands.add_parser("leave", help="have a group of a live run leave in order, for maintenance"))
    _add_stop(commands.add_parser("stop", help="tell a live run to save and to end"))
    _add_supervise(commands.add_parser("supervise", help="in a Slurm job: launch on all its nodes, and look after it"))
    burn_in = commands.add_parser("burn-in", help="in a Slurm job: a run that is struck on purpose, and a verdict")
    words.add(burn_in, _burn_in)
    _add_inject(commands.add_parser("inject", help="strike a live run with the faults of a schedule, or of a drawn mix"))
    _add_report(commands.add_parser("report", help="tables and pictures of a run directory"))
    _add_doctor(commands.add_parser("doctor", help="what works on this machine, or on all hosts, and who is bad"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_cluster(parser)
    parser.add_argument("--redundancy", metavar="R", help="hosts of each shard (default: the best for each policy)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="picture: time-to-train over r and over cluster size")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the fault_tolerance section here")
    parser.set_defaults(run=_plan)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", help="llama3-16k, fthsdp-100k, spare-600k, recover-512 or lab-64")
    parser.add_argument("--file", type=Path, help="YAML or JSON with the values below, names with underscores")
    parser.add_argument("--measured", type=Path, metavar="RUN_DIR", help="what that run needed, and how often it failed")
    values = parser.add_argument_group("values", "of the cluster and the job; they replace those from elsewhere")
    # As text: a wrong value in a flag gets the same line as one in a file.
    for name, text in (
        ("gpus", "all GPUs"),
        ("gpus-per-group", "GPUs of one model replica"),
        ("gpus-per-node", "default: 8"),
        ("node-mtbf-hours", "mean time between failures of one node"),
        ("failures-per-1000-node-days", "or how often something fails (Llama 3: 3.79)"),
        ("system-mtbf-s", "or the mean time between failures of the whole system"),
        ("step-s", "a failure-free step"),
        ("allreduce-s", "the part of it that only reduces (default: 0)"),
        ("gradient-gb", "or by formula: gradients of one position, 10^9 bytes,"),
        ("link-gb-s", "the link it reduces them over, 10^9 bytes a second,"),
        ("link-latency-us", "its latency, microseconds (default: 0),"),
        ("allreduce-algorithm", "and ring or tree (default: ring)"),
        ("microbatches", "of one group in a step (default: 16)"),
        ("steps", "of the whole run (default: 10000)"),
        ("restart-s", "of the whole job"),
        ("checkpoint-s", "during which training stands still"),
        ("detection-s", "until a failure is known (default: 5)"),
        ("reconfigure-s", "until the survivors go on (default: 2)"),
        ("rejoin-s", "until a lost group is back, or none (default: 900)"),
        ("price-per-gpu-hour", "to see the cost, in whatever it is in"),
    ):
        values.add_argument(f"--{name}", help=text, metavar=name.rpartition("-")[2].upper())


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """What the run says that was named; nothing if none was."""
    if options.measured is None:
        return {}
    from megatron_ft.report import measured
    from megatron_ft.report.record import RunRecord

    return measured.measured(RunRecord.load(options.measured))


def _plan(options: argparse.Namespace) -> int:
    from megatron_ft import config
    from megatron_ft.planner import command

    def refused(section: dict) -> str | None:
        try:
            config.resolve(section, groups=cluster.groups)
        except FTError as error:
            return str(error)
        return None

    options.values = _measured(options)
    cluster = command.cluster(options)
    return command.show(cluster, options, refused)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_cluster(parser)
    parser.add_argument("--policy", metavar="NAMES", help="with commas between them (default: all)")
    parser.add_argument("--redundancy", metavar="R", help="hosts of each shard (default: the planner's for each policy)")
    parser.add_argument("--period-s", metavar="S", help="between checkpoints (default: the planner's for each policy)")
    parser.add_argument("--trials", default="3", metavar="N", help="runs of each policy (default: 3)")
    parser.add_argument("--seed", default="0", metavar="N", help="of the first trial; all policies have the same")
    parser.add_argument("--jobs", default=str(os.cpu_count() or 1), metavar="N", help="processes (default: all cores)")
    parser.add_argument("--jitter", default="0.05", metavar="X", help="relative deviation of every duration (default: 0.05)")
    parser.add_argument("--read-s", default="0", metavar="S", help="to read one shard ahead (default: 0)")
    parser.add_argument("--shard-gb", default="0", metavar="GB", help="memory for one shard, to see what hosting costs")
    failures = parser.add_argument_group("failures", "what the mean time between them leaves open")
    failures.add_argument("--shape", default="0.78", metavar="X", help="Weibull; 1 is exponential (default: 0.78)")
    failures.add_argument("--renewal", default="system", metavar="WHAT", help="system, groups or replaced (default: system)")
    failures.add_argument("--hit-the-dead", action="store_true", help="a failure may hit a group that is lost already")
    failures.add_argument("--in-restart", default="missing", metavar="WHAT", help="missing, none, again (default: missing)")
    failures.add_argument(
        "--restart-finds", default="everybody", metavar="WHO", help="everybody, survivors, divisor (default: everybody)"
    )
    failures.add_argument("--frail-share", default="0", metavar="X", help="share of groups that fail more often")
    failures.add_argument("--frail-weight", default="10", metavar="X", help="how much more often (default: 10)")
    failures.add_argument("--rack-share", default="0", metavar="X", help="share of failures that take a whole rack")
    failures.add_argument("--rack-groups", default="1", metavar="N", help="neighbouring groups of a rack (default: 1)")
    failures.add_argument("--mix", action="store_true", help="crashes, hangs, flaps, stragglers, ... as large jobs see them")
    failures.add_argument("--trace", type=Path, metavar="CSV", help="recorded failures: columns seconds, group")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="picture: where the time went")
    parser.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from megatron_ft.sim.training import command

    options.values = _measured(options)
    return command.run(options)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="directory of the prepared dataset")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="own txt, jsonl or parquet files")
    parser.add_argument("--vocab-size", type=int, default=4096, help="size of the BPE vocabulary (default: 4096)")
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from megatron_ft import data

    data.prepare(options.out, options.text, vocab_size=options.vocab_size)
    return 0


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, required=True, help="replica groups to start with (N)")
    parser.add_argument("--ranks-per-group", type=int, help="default: pipeline stages x slices of the config, else 1")
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed-style JSON")
    parser.add_argument("--run-dir", type=Path, required=True, help="where the run record goes")
    parser.add_argument("--port", type=int, default=0, help="port of the control store (default: a free one)")
    hosts = parser.add_argument_group("several hosts", "the same command on each of them, with its own --host-rank")
    hosts.add_argument("--hosts", type=int, metavar="H", help="how many (default: 1)")
    hosts.add_argument("--host-rank", type=int, metavar="K", help="this one; host 0 has the control store")
    hosts.add_argument("--store", metavar="HOST:PORT", help="of host 0: its address and a free port there; or etcd, etcd://...")
    hosts.add_argument("--hostfile", type=Path, metavar="FILE", help="or all this from lines NAME slots=RANKS, and --port")
    hosts.add_argument("--spare-hosts", type=int, default=0, metavar="S", help="the last S of them wait for a lost one")
    hosts.add_argument("--job-id", metavar="ID", help="a new name, the same on all hosts: with etcd, or in place of --store")
    hosts.add_argument("--address", metavar="ADDR", help="by which others reach this host (default: found)")
    ssh = parser.add_argument_group("over ssh", "one command for all hosts of a --hostfile, started on any machine")
    ssh.add_argument("--ssh", action="store_true", help="start an agent on each of them, and follow the run")
    ssh.add_argument("--ssh-command", default="ssh", metavar="CMD", help="ssh and options, as one word (default: ssh)")
    ssh.add_argument("--export", action="append", default=[], metavar="NAME[=VALUE]", help="one more variable for all hosts")
    parser.add_argument("--failure-domains", type=_names, metavar="NAMES", help="rack or switch of each group, if not set")
    parser.add_argument("--track", type=_names, default=(), help="tensorboard,wandb (extra 'track')")
    parser.add_argument("--overwrite", action="store_true", help="delete the run the run directory holds")
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto: go on from the newest checkpoint, if there is one; never: refuse where there is one",
    )
    _add_preload(parser)
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs="*", help="its arguments, after --")
    parser.set_defaults(run=_launch)


def _add_preload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preload", type=_names, default=(), metavar="NAMES", help="modules imported once for all ranks")
    parser.add_argument("--no-preload", action="store_true", help="each rank imports torch by itself, nothing is forked")


def _launch(options: argparse.Namespace) -> int:
    from megatron_ft.launch import forkserver, resume, which_host

    run = resume.config(options.config, options.groups, options.ranks_per_group, options.failure_domains)
    run = which_host.with_store(options, run)
    options.target = None
    if options.ssh:
        from megatron_ft.launch import everywhere
        from megatron_ft.report import follow

        return everywhere.launch(everywhere.asked(options, run), lambda: follow.shown(options.groups, options.run_dir))
    if options.hostfile is not None:
        which_host.from_hostfile(options, run)
    elif options.hosts is None and options.host_rank is None and options.store is None:
        which_host.from_surroundings(options)
    if options.spare_hosts:
        from megatron_ft.launch import join

        options.hosts, spare = join.without_spares(options.hosts or 1, options.host_rank or 0, options.spare_hosts)
        if spare:
            running = join.await_launch(options.run_dir, options.store, options.job_id, run)
            return _join_as(options, running, 0)
    which_host.check_store(options, run)
    job = resume.WholeJob(run, options.hosts or 1)
    while True:
        forks = None
        if not options.no_preload:  # before torch is imported here: both take as long
            here = max(1, run.groups * run.ranks_per_group // max(1, options.hosts or 1))
            forks = forkserver.ForkServer(forkserver.common_environment(here), options.preload)
        try:
            code = _launch_from(options, run, forks)
        finally:
            if forks is not None:
                forks.close()
        if not job.again(code):
            return code


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="of the run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--groups", type=int, metavar="K", help="so many more, on this node")
    what.add_argument("--spare", action="store_true", help="wait for a host that is lost, and take its groups over")
    parser.add_argument("--address", metavar="ADDR", help="by which others reach this host (default: found)")
    _add_preload(parser)
    parser.set_defaults(run=_join)


def _join(options: argparse.Namespace) -> int:
    from megatron_ft.launch import join

    return _join_as(options, join.find(options.run_dir), options.groups or 0)


def _join_as(options: argparse.Namespace, running: join.Running, groups: int) -> int:
    """With so many groups, or as a spare."""
    from megatron_ft.launch import forkserver, join
    from megatron_ft.launch.agent import Agent, LaunchOptions

    newcomer = join.enter(running, groups, options.address)
    forks = None
    if not options.no_preload:
        forks = forkserver.ForkServer(forkserver.common_environment(join.ranks_here(newcomer)), options.preload)
    try:
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
    finally:
        if forks is not None:
            forks.close()


def _launch_from(options: argparse.Namespace, run: RunConfig, forks: ForkServer | None) -> int:
    from megatron_ft.launch.agent import Agent, LaunchOptions
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
            resume=options.resume,
        ),
        forks,
    )
    with follow.shown(options.groups, options.run_dir):
        return agent.run()


def _add_inject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run directory of a live run, on this host")
    parser.add_argument("schedule", type=Path, nargs="?", help="JSON or YAML; see docs/fault-injection.md")
    parser.add_argument("--mix", type=int, metavar="N", help="or draw N faults, as large jobs see them")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of --mix (default: 0)")
    parser.add_argument("--every-s", type=float, default=30.0, metavar="S", help="mean time between them (default: 30)")
    parser.add_argument("--write", type=Path, metavar="JSON", help="write the schedule here, to read or repeat it")
    parser.add_argument("--min-survivors", type=int, default=1, metavar="K", help="refuse what leaves fewer (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="show what would happen, touch nothing")
    parser.add_argument("--groups", type=int, metavar="N", help="with --dry-run: of a run that is not there yet")
    parser.add_argument("--start-timeout-s", type=float, default=60.0, metavar="S", help="wait for the run (default: 60)")
    parser.set_defaults(run=_inject)


def _inject(options: argparse.Namespace) -> int:
    from megatron_ft.faults import command

    return command.run(options)


def _add_leave(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("group", type=int, help="its number")
    parser.add_argument("--why", default="asked by megatron-ft leave", help="for the record")
    parser.add_argument("--patience-s", type=float, default=600.0, help="how long its answer is waited for (default: 600)")
    parser.set_defaults(run=_leave)


def _leave(options: argparse.Namespace) -> int:
    from megatron_ft.launch import ask

    ask.leave(options.run_dir, options.group, options.why, options.patience_s)
    return 0


def _add_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="of the run")
    parser.add_argument("--why", default="asked by megatron-ft stop", help="for the record")
    parser.set_defaults(run=_stop)


def _stop(options: argparse.Namespace) -> int:
    from megatron_ft.launch import ask

    ask.stop(options.run_dir, options.why)
    return 0


def _add_supervise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stop-before-s", type=float, default=300.0, metavar="S", help="the time limit (default: 300)")
    parser.add_argument("--failures-per-node", type=int, default=3, metavar="N", help="then it is drained (default: 3)")
    parser.add_argument("--second", action="store_true", help="wait until the first supervisor is lost (for itself)")
    parser.add_argument("--array", action="store_true", help="as an element of an array job, with one node of its own")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help="launch and its options, without those of hosts")
    parser.set_defaults(run=_supervise)


def _of_job(options: argparse.Namespace) -> argparse.Namespace:
    """What is to be launched on the hosts of a job; ``words``: as it was written, ``settings``: what they come to."""
    from megatron_ft.errors import LaunchError
    from megatron_ft.launch import resume, which_host

    command = options.launch[1:] if options.launch[:1] == ["--"] else options.launch
    if command[:1] != ["launch"]:
        name = options.command
        raise LaunchError(f"what is to be launched is missing; write: megatron-ft {name} [OPTIONS] launch --groups N ...")
    asked = _parser().parse_args(command)
    asked.settings = which_host.with_store(asked, resume.config(asked.config, asked.groups, asked.ranks_per_group))
    if asked.hosts is not None or asked.host_rank is not None or asked.store or asked.hostfile or asked.job_id:
        raise LaunchError("Slurm says which hosts there are: leave --hosts, --host-rank, --store, --hostfile, --job-id out")
    asked.words = command[1:]
    return asked


def _supervise(options: argparse.Namespace) -> int:
    from megatron_ft.launch import supervisor

    asked = _of_job(options)
    run = asked.settings
    if options.array:
        from megatron_ft.launch import array

        limits = array.limits(run.fault_tolerance, array.place(os.environ), asked.spare_hosts, options.failures_per_node)
        return array.Element(asked.words, asked.run_dir.resolve(), asked.spare_hosts, limits, array.place(os.environ)).run()
    return supervisor.Supervisor(
        supervisor.Options(
            launch=asked.words,
            run=run,
            run_dir=asked.run_dir.resolve(),
            spares=asked.spare_hosts,
            limits=supervisor.limits(run.fault_tolerance, options.failures_per_node, options.stop_before_s),
            waits=options.second,
        )
    ).run()


def _burn_in(options: argparse.Namespace) -> int:
    from megatron_ft.burnin import command

    return command.run(options, _of_job(options))


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument("--reference", type=Path, help="run directory of a failure-free run to compare with")
    said = parser.add_mutually_exclusive_group()
    said.add_argument("--slurm", action="store_true", help="ask sacct, squeue and scontrol now what they say of the job")
    said.add_argument("--sacct", type=Path, metavar="FILE", help="or explain what they have said, as somebody has sent it")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from megatron_ft.launch import slurm_now
    from megatron_ft.report import command

    return command.run(options, slurm_now.ask)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines, with everything that was measured")
    hosts = parser.add_argument_group("several hosts", "the same command on each; inside srun, torchrun, mpirun as found")
    hosts.add_argument("--hosts", type=int, metavar="H", help="how many (default: this machine alone)")
    hosts.add_argument("--host-rank", type=int, metavar="K", help="this one")
    hosts.add_argument("--store", metavar="HOST:PORT", help="of host 0: its address and a free port there")
    hosts.add_argument("--hostfile", type=Path, metavar="FILE", help="or all this from lines NAME slots=RANKS, and --port")
    hosts.add_argument("--port", type=int, default=0, help="with --hostfile: a free port of the first host")
    hosts.add_argument("--directory", type=Path, metavar="DIR", help="one they share: its disk is tried")
    hosts.add_argument("--job-id", metavar="ID", help="a new name, the same on all hosts: in place of --store")
    hosts.add_argument("--address", metavar="ADDR", help="by which others reach this host (default: found)")
    hosts.add_argument("--factor", type=float, default=3.0, metavar="X", help="slower by so much is bad (default: 3)")
    hosts.add_argument("--patience-s", type=float, default=60.0, metavar="S", help="wait so long for all (default: 60)")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_ft.doctor import meeting, run_doctor, together
    from megatron_ft.launch import which_host

    options.target = None
    if options.hosts is None and options.host_rank is None and options.hostfile is None:
        which_host.from_surroundings(options)
    where = meeting.find(options)
    if where is None:
        return run_doctor(Console(), as_json=options.json, directory=options.directory)
    return together.run_together(where, Console(), options.json, options.factor)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
