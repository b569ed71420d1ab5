"""A throw-away Slurm cluster on one machine, to break at will: ``python tools/slurm_lab.py up --nodes 3``.

Real daemons of a real Slurm (Debian 12: 22.05), without systemd: one slurmctld and one munged on this machine, and a slurmd
for each node. Every node n1, n2, ... has a network (``tools/netlab.py``), a host name and a hosts file of its own, and sees
the files of this machine, like a shared file system. With ``--plain``, for containers that allow no namespaces, nodes
differ only in their SLURMD_NODENAME.

All that a lab writes is below its directory, and nothing that it is made of outlives ``down``. Each command finds the lab
by that directory, and its processes by looking at /proc: what names the lab's files or is in a node's network is its own.
A pid in a file could belong to another process by now.

Failures it assumes: any of its processes is dead or frozen at any time, and an ``up`` can be killed half way.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__:
    from tools import netlab, proc, slurm_conf
else:  # run as a script, which finds what lies beside it
    import netlab
    import proc
    import slurm_conf

DIRECTORY = Path(tempfile.gettempdir()) / "slurm-lab"
_PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
_ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
_SBIN = ["/usr/sbin", "/sbin"]
_DEADLINE_S = 60.0
_LONGEST_PATH = 70  # a socket's name has 107 characters at most, and munge's and the steps' are in here
_DAEMONS = {"slurmctld", "slurmd", "slurmstepd", "munged", "slurmdbd", "mariadbd"}
_CLIENTS = {"srun", "salloc", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "squeue"}


class LabError(Exception):
    """The lab cannot do the requested action. The message gives the remedy."""


def missing(plain: bool = False, accounting: bool = False) -> str:
    """Return why there can be no lab here; empty when there can."""
    if os.geteuid() != 0:
        return "a Slurm lab needs root"
    path = os.pathsep.join([os.environ.get("PATH", ""), *_SBIN])
    needed = _PACKAGES | (_ACCOUNTING if accounting else {})
    lacking = [package for command, package in needed.items() if shutil.which(command, path=path) is None]
    if lacking:
        return f"not all of Slurm is here; as root: apt-get install {' '.join(lacking)}"
    if not plain and shutil.which("ip", path=path) is None:
        return "no iproute2 here; as root: apt-get install iproute2 (or nodes that share one network: --plain)"
    why = "" if plain else netlab.missing()
    return f"{why}; nodes that share one network need none: --plain" if why else ""


class Lab:
    """The lab in ``directory``: the one that is up there, or one to be. The rest is for :meth:`up`."""

    def __init__(self, directory: Path | str = DIRECTORY, nodes: int = 3, **shape: Any) -> None:
        self.directory = Path(directory).resolve()
        self.conf = self.directory / "slurm.conf"
        self._log = self.directory / "log"
        self.shape = slurm_conf.load(self.directory) or slurm_conf.Shape(nodes=nodes, **shape)

    @property
    def env(self) -> dict[str, str]:
        """The environment with which Slurm's commands talk to this lab."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        path = own.get("PATH", "").split(os.pathsep)
        path += [directory for directory in _SBIN if directory not in path]
        return {**own, "PATH": os.pathsep.join(path), "SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        return self.shape.names

    def address(self, node: str) -> str:
        return self.shape.addresses[self._index(node)]

    def run(self, command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command with the lab's environment, to its end; ``options`` of ``subprocess.run``."""
        return subprocess.run(
            [*map(str, command)], **{"capture_output": True, "text": True, "env": self.env, **options}
        )

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # --- up and down --------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start the lab; return when all nodes are idle. After a failed start everything is taken down again, and its
        last output is the error."""
        self._check()
        try:
            with _alone():
                self._claim()
                slurm_conf.write(self.directory, self.shape)
                self._start_daemons()
            self._await_idle()
        except (LabError, subprocess.CalledProcessError) as error:
            words = getattr(error, "stderr", None) or error
            error = LabError(f"the lab does not come up: {words}\n{self._last_words()}".rstrip())
            self.down()
            raise error from None
        except BaseException:
            self.down()
            raise

    def down(self) -> bool:
        """Remove whatever there is of the lab. Return False when there was nothing."""
        if not self._is_up:
            return False
        for node in self.nodes:
            self._kill(lambda node=node: self._members(node))
        self._kill(self._others)
        if not self.shape.plain:
            self.shape.network.down()
        for name in slurm_conf.FOLDERS:
            shutil.rmtree(self.directory / name, ignore_errors=True)
        for name in slurm_conf.FILES:
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()  # other files may be in the directory
        return True

    @property
    def _is_up(self) -> bool:
        return slurm_conf.load(self.directory) is not None

    def _check(self) -> None:
        if self._is_up:
            raise LabError(
                f"there is a lab in {self.directory} already; take it down first, or give another --directory"
            )
        if not 1 <= self.shape.nodes <= slurm_conf.MOST_NODES:
            raise LabError(f"--nodes is {self.shape.nodes}; a lab has 1 to {slurm_conf.MOST_NODES}")
        if len(str(self.directory)) > _LONGEST_PATH:
            raise LabError(
                f"--directory {self.directory} is longer than {_LONGEST_PATH} characters; take a shorter one"
            )
        why = missing(self.shape.plain, self.shape.accounting)
        if why:
            raise LabError(why)

    def _claim(self) -> None:
        """Take a free slot, beginning at one of the directory's own; write it down before anything else is made."""
        free = next((shape for shape in self.shape.slots(self.directory) if shape.is_free), None)
        if free is None:
            raise LabError("all places for labs are taken on this machine; take some down")
        self.shape = free
        slurm_conf.save(self.directory, free)

    def _start_daemons(self) -> None:
        if not self.shape.plain:
            self.shape.network.up()
            self.shape.network.join()
        files = {"socket": "run/munge.socket", "key-file": "munge.key", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "run/munge.seed"}
        options = [f"--{name}={self.directory / path}" for name, path in files.items()]
        self._start("munged", "--force", "--num-threads=2", *options)
        if self.shape.accounting:
            self._start_accounting()
        self._start("slurmctld", "-f", self.conf)
        for node in self.nodes:
            self._start_slurmd(node)

    def _start_accounting(self) -> None:
        """Start slurmdbd, and a database for it that no other process sees."""
        socket, data = self.directory / "run" / "mariadb", self.directory / "database"
        own = ["--no-defaults", "--user=root", f"--datadir={data}"]
        self._start("mariadb-install-db", *own, "--auth-root-authentication-method=socket", "--skip-test-db")
        own += ["--skip-networking", f"--socket={socket}", "--innodb-flush-log-at-trx-commit=0"]
        self._start("setsid", "--fork", "mariadbd", *own)
        ping = ["mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"]
        _await(lambda: self.run(ping).returncode == 0, "the database answers")
        self._start("slurmdbd", env={**self.env, "MYSQL_UNIX_PORT": str(socket)})
        add = ["sacctmgr", "--immediate", "add", "cluster", "lab"]
        _await(lambda: self.run(add).returncode == 0, "slurmdbd answers")

    def _start_slurmd(self, node: str) -> None:
        command: list[object] = ["slurmd", "-N", node, "-f", self.conf]
        if not self.shape.plain:
            own = f"hostname {node} && mount --bind {shlex.quote(str(self.directory / 'hosts'))} /etc/hosts"
            inside = ["ip", "netns", "exec", self.shape.network.namespace(self._index(node))]
            command = [*inside, "unshare", "--uts", "sh", "-c", f'{own} && exec "$@"', "sh", *command]
        self._start(*command)

    def _start(self, *command: object, **options: Any) -> None:
        """Daemons leave the foreground by themselves; what they say until then is in the log."""
        with (self._log / "start.log").open("ab") as log:
            options |= {"stdin": subprocess.DEVNULL, "capture_output": False, "stdout": log, "stderr": log, "cwd": "/"}
            done = self.run(command, **options)
        if done.returncode:
            raise LabError(f"{shlex.join(map(str, command))} ends with {done.returncode}")

    def _await_idle(self) -> None:
        def ready() -> bool:
            states = self.states()
            return [states.get(node) for node in self.nodes] == ["idle"] * self.shape.nodes

        _await(ready, "all nodes are idle", lambda: f"sinfo says {self.states()}")

    def states(self) -> dict[str, str]:
        """Return each node's state from sinfo (``idle``, ``mixed``, ``down*``); empty when slurmctld does not answer."""
        said = self.run(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout
        return dict(line.split() for line in said.splitlines())

    def _last_words(self) -> str:
        found = []
        for path in sorted(self._log.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            telling = [line for line in lines if path.name == "start.log" or "error" in line or "fatal" in line]
            found += [f"{path.name}: {line}" for line in telling[-5:]]
        return "\n".join(found)

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill_node(self, node: str) -> None:
        """SIGKILL to its slurmd, its steps' slurmstepds and all processes of its jobs; none of them sees another one die.
        The kernel still closes their connections: a node that shall not say good-bye, :meth:`cut` it first."""
        self.freeze(node)
        self._kill(lambda: self._members(node))

    def freeze(self, node: str) -> None:
        """SIGSTOP to all of them; returns when all have stopped. The kernel still answers for them."""
        self.require(node)
        sent: set[int] = set()

        def stopped() -> bool:
            # One that waits for a disk or a child of vfork takes no signal, and runs no more when it could.
            states = {pid: proc.state(pid) for pid in self._members(node)}
            awake = {pid for pid, state in states.items() if state not in "TtZX" and not (state == "D" and pid in sent)}
            proc.send(awake, signal.SIGSTOP)
            sent.update(awake)
            return not awake

        _await(stopped, f"all of {node} has stopped")

    def thaw(self, node: str) -> None:
        self.require(node)
        proc.send(self._members(node), signal.SIGCONT)

    def cut(self, node: str) -> None:
        """Unplug it from the network. Its processes go on."""
        self._network(node).cut(self._index(node))

    def heal(self, node: str) -> None:
        """Plug it in; returns when packets pass."""
        self._network(node).plug_in(self._index(node))

    def start_node(self, node: str) -> None:
        """slurmd again, after :meth:`kill_node`; returns when Slurm can use the node."""
        self.require(node)
        if self.slurmd(node) != "dead":
            raise LabError(f"the slurmd of {node} is not dead; kill-node ends it, thaw wakes a frozen one")
        begun = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._start_slurmd(node)

        def registered() -> bool:
            said = self.run(["scontrol", "-o", "show", "node", node]).stdout
            fields = dict(word.split("=", 1) for word in said.split() if "=" in word)
            return fields.get("SlurmdStartTime", "") >= begun and "NOT_RESPONDING" not in fields["State"]

        _await(registered, f"{node} has registered", self._last_words)
        if self.states()[node].startswith(("down", "drain")):
            self.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=True)

    def restart_controller(self) -> None:
        """slurmctld ends in order and starts again, from its saved state; returns when it answers. For some 5 s more it
        calls all nodes busy; an srun that asks for a step in that time waits for two minutes, unless it is --immediate."""
        self.require()
        proc.send(self._others("slurmctld"), signal.SIGTERM)
        _await(lambda: not self._others("slurmctld"), "slurmctld has ended")
        self._start("slurmctld", "-f", self.conf)
        _await(lambda: "is UP" in self.run(["scontrol", "ping"]).stdout, "slurmctld answers", self._last_words)

    def tasks_of(self, node: str) -> set[int]:
        """The pids of what jobs run there: tasks, and on its first node a job's script and its sruns."""
        self.require(node)
        return {pid for pid in self._members(node) if _program(pid) not in _DAEMONS}

    def slurmd(self, node: str) -> str:
        """``runs``, ``frozen`` or ``dead``."""
        states = {proc.state(pid) for pid in self._members(node) if _program(pid) == "slurmd"}
        return "dead" if not states else "frozen" if states <= set("Tt") else "runs"

    def require(self, *nodes: str) -> None:
        """Raises ``LabError`` unless the lab is up and has these nodes."""
        if not self._is_up:
            raise LabError(f"no lab is up in {self.directory}; start one: python tools/slurm_lab.py up --nodes 3")
        for node in nodes:
            if node not in self.nodes:
                raise LabError(f"there is no node {node}; this lab has {', '.join(self.nodes)}")

    def _network(self, node: str) -> netlab.Network:
        self.require(node)
        if self.shape.plain:
            raise LabError("the nodes of a --plain lab share one network; cut and heal need a lab without it")
        return self.shape.network

    def _index(self, node: str) -> int:
        return self.nodes.index(node)

    # --- its processes ------------------------------------------------------------------------------------------------

    def _members(self, node: str) -> set[int]:
        """All processes of that node: slurmd, slurmstepds, what its jobs have started, and what comes from those."""
        space = None
        if not self.shape.plain:
            space = proc.identity(f"/run/netns/{self.shape.network.namespace(self._index(node))}")
        log, marks = slurm_conf.slurmd_log(self.directory, node), {f"SLURM_CONF={self.conf}", f"SLURMD_NODENAME={node}"}
        own: set[int] = set()
        for pid in proc.pids():
            daemon = _program(pid)
            if (
                (space is not None and proc.identity(f"/proc/{pid}/ns/net") == space)
                or (daemon == "slurmd" and {str(self.conf), node} <= set(proc.command(pid)))
                or (daemon == "slurmstepd" and log in proc.open_files(pid))
                or marks <= set(proc.environment(pid))
            ):
                own.add(pid)
        return proc.with_descendants(own)

    def _others(self, *names: str) -> set[int]:
        """The lab's processes outside of its nodes: daemons, and commands that wait for them. ``names``: only those."""
        conf, socket, env = str(self.conf), f"--socket={self.directory}/run/munge.socket", f"SLURM_CONF={self.conf}"
        programs = {pid: _program(pid) for pid in proc.pids()}
        own = {pid: name for pid, name in programs.items() if name in (names or _DAEMONS | _CLIENTS)}
        daemons = {pid for pid in own if {conf, socket} & set(proc.command(pid))}
        return proc.with_descendants(daemons) | {pid for pid in own if env in proc.environment(pid)}

    def _kill(self, find: Callable[[], set[int]]) -> None:
        """SIGKILL, until there are none."""

        def gone() -> bool:
            pids = find()
            proc.send(pids, signal.SIGKILL)
            return not pids

        _await(gone, "all that were killed are gone")


def _program(pid: int) -> str:
    """Without what Debian adds to the names of Slurm's daemons."""
    return proc.program(pid).removesuffix("-wlm")


# --- this machine -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock under which a lab on this machine looks for a slot."""
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _await(condition: Callable[[], object], what: str, why_not: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not within {_DEADLINE_S:g} s {why_not()}".rstrip())
        time.sleep(0.05)


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.act(options) or 0
    except (LabError, OSError) as error:
        print(f"slurm_lab: {error}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"slurm_lab: {shlex.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slurm_lab", description="A throw-away Slurm cluster on one machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        own = commands.add_parser(name, help=text, description=text)
        own.add_argument("--directory", type=Path, default=DIRECTORY, metavar="DIR", help=f"the lab's ({DIRECTORY})")
        own.set_defaults(act=act)
        return own

    up = command("up", _up, "start one; returns when all nodes are idle")
    up.add_argument("--nodes", type=int, default=3, metavar="N", help="n1, n2, ... (3)")
    up.add_argument("--plain", action="store_true", help="all nodes share this machine's network and name")
    up.add_argument("--topology", action="store_true", help="a tree of switches, each with two nodes")
    up.add_argument("--accounting", action="store_true", help="sacct works, with slurmdbd and MariaDB")
    timeout = up.add_argument("--slurmd-timeout", type=int, default=300, metavar="SECONDS")
    timeout.help = "after which Slurm gives up a silent node (300, as on most clusters)"
    command("down", _down, "end it; nothing is left behind")
    command("status", _status, "its nodes, and what Slurm thinks of them")
    faults = {
        "kill-node": "SIGKILL to a node's slurmd, slurmstepds and jobs",
        "start-node": "slurmd again, node resumed",
    }
    faults |= {"freeze": "SIGSTOP to all of a node", "thaw": "SIGCONT to all of a node"}
    faults |= {"cut": "unplug a node from the network", "heal": "plug it in"}
    for name, text in faults.items():
        command(name, _on_node, text).add_argument("node", metavar="NODE")
        commands.choices[name].set_defaults(method=name.replace("-", "_"))
    command(
        "restart-controller", lambda options: Lab(options.directory).restart_controller(), "slurmctld ends and starts"
    )
    command("env", _env, 'eval "$(python tools/slurm_lab.py env)": sbatch, srun, squeue then talk to this lab')
    run = command("run", _run, "run a command that talks to this lab")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD ...")
    return parser


def _up(options: argparse.Namespace) -> None:
    shape = {name: getattr(options, name) for name in ("plain", "topology", "accounting")}
    shape |= {"slurmd_timeout_s": options.slurmd_timeout}
    lab = Lab(options.directory, options.nodes, **shape)
    lab.up()
    own = [] if options.directory == DIRECTORY else ["--directory", str(options.directory)]
    print(f"{len(lab.nodes)} nodes are idle: {' '.join(lab.nodes)}")
    print(f'eval "$({shlex.join(["python", "tools/slurm_lab.py", "env", *own])})"')


def _down(options: argparse.Namespace) -> None:
    was = Lab(options.directory).down()
    print(f"the lab in {options.directory} is down" if was else f"there is no lab in {options.directory}")


def _status(options: argparse.Namespace) -> None:
    lab = Lab(options.directory)
    lab.require()
    states = lab.states()
    print(f"slurmctld {'answers' if states else 'does not answer'}")
    for node in lab.nodes:
        told = f"{lab.slurmd(node)}, {len(lab.tasks_of(node))} processes of jobs"
        print(f"{node:4} {lab.address(node):12} {states.get(node, '?'):12} slurmd {told}")


def _on_node(options: argparse.Namespace) -> None:
    getattr(Lab(options.directory), options.method)(options.node)


def _env(options: argparse.Namespace) -> None:
    lab = Lab(options.directory)
    lab.require()
    print(f"export SLURM_CONF={shlex.quote(str(lab.conf))} PATH={shlex.quote(lab.env['PATH'])}")


def _run(options: argparse.Namespace) -> None:
    lab = Lab(options.directory)
    lab.require()
    if not options.words:
        raise LabError("run what? python tools/slurm_lab.py run squeue")
    os.execvpe(options.words[0], options.words, lab.env)


if __name__ == "__main__":
    sys.exit(main())
