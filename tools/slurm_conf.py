"""The configuration of a lab of ``tools/slurm_lab.py``: its nodes, names, addresses and ports, and its slurm.conf."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __package__:
    from tools import netlab
else:  # imported by a script, which finds modules beside it
    import netlab

MOST_NODES = 60
CPUS = 8
"""The processors of each node, whatever the machine has: Slurm only counts them."""
FILES = ["slurm.conf", "slurmdbd.conf", "cgroup.conf", "gres.conf", "topology.conf", "hosts", "munge.key"]
FILES += ["jobcomp.txt", "lab.json"]
FOLDERS = ["log", "state", "spool", "run", "database"]
"""All files and folders that a lab writes, below its directory."""
_SLOTS = 200
_FIRST_PORT = 17000  # below those that the kernel hands out


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The configuration with which a lab was started. ``slot`` tells the lab from those beside it: its ports,
    addresses and names come from that. ``gpus``: those of each node, which Slurm only counts, as it does processors."""

    nodes: int = 3
    plain: bool = False
    topology: bool = False
    accounting: bool = False
    gpus: int = 0
    slurmd_timeout_s: int = 300
    slot: int = -1

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def network(self) -> netlab.Network:
        return netlab.Network(f"slurm{self.slot}", f"10.77.{self.slot}", self.nodes)

    @property
    def addresses(self) -> list[str]:
        return ["127.0.0.1" if self.plain else self.network.address(host) for host in range(self.nodes)]

    @property
    def controller(self) -> tuple[str, str]:
        """The name and address of this machine."""
        return socket.gethostname().split(".")[0], "127.0.0.1" if self.plain else self.network.own_address

    @property
    def ports(self) -> range:
        """Return the port of slurmctld, then those of the nodes."""
        first = _FIRST_PORT + self.slot * (MOST_NODES + 2)
        return range(first, first + 1 + self.nodes)

    @property
    def accounting_port(self) -> int:
        return self.ports[0] + MOST_NODES + 1

    @property
    def is_free(self) -> bool:
        """Return whether no other lab has this slot, and no other process its ports and names."""
        taken = not self.plain and (self.network.exists or netlab.ip("-4", "route", "show", f"{self.controller[1]}/24"))
        return not taken and all(map(_can_listen, [*self.ports, self.accounting_port]))

    def slots(self, directory: Path) -> Iterator[Shape]:
        """Return this shape in every slot, from the directory's own on."""
        first = zlib.crc32(str(directory).encode())
        return (replace(self, slot=(first + more) % _SLOTS) for more in range(_SLOTS))


def load(directory: Path) -> Shape | None:
    """Load the shape of the lab that is up there."""
    try:
        return Shape(**json.loads((directory / "lab.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def save(directory: Path, shape: Shape) -> None:
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = directory / "lab.json.part"
    part.write_text(json.dumps(asdict(shape)), encoding="utf-8")
    part.replace(directory / "lab.json")


def write(directory: Path, shape: Shape) -> None:
    """Write all files that the daemons read."""
    for name in (*FOLDERS, *(f"spool/{node}" for node in shape.names)):
        (directory / name).mkdir(mode=0o755, exist_ok=True)
    key = directory / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(1024))
    name, address = shape.controller
    known = {"localhost": "127.0.0.1", **dict(zip(shape.names, shape.addresses, strict=True)), name: address}
    texts = {
        "slurm.conf": _slurm_conf(directory, shape),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
        "hosts": "".join(f"{at}\t{host}\n" for host, at in known.items()),
    }
    if shape.gpus:
        for number in range(shape.gpus):
            (directory / "run" / f"gpu{number}").touch()  # Slurm counts files
        texts["gres.conf"] = f"Name=gpu File={directory}/run/gpu[0-{shape.gpus - 1}]\n"
    if shape.topology:
        texts["topology.conf"] = _topology(shape.names)
    if shape.accounting:
        texts["slurmdbd.conf"] = _slurmdbd_conf(directory, shape)
        (directory / "slurmdbd.conf").touch(mode=0o600)  # slurmdbd takes no other
    for file, text in texts.items():
        (directory / file).write_text(text, encoding="utf-8")


def _slurm_conf(directory: Path, shape: Shape) -> str:
    name, address = shape.controller
    port, *ports = shape.ports
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{name}({address})",
        "SlurmctldPort": port,
        "SlurmUser": "root",
        "AuthInfo": f"socket={directory}/run/munge.socket",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "ReturnToService": 1,
        "SlurmdTimeout": shape.slurmd_timeout_s,
        "SlurmdParameters": "config_overrides",
        "SchedulerParameters": "batch_sched_delay=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "TopologyPlugin": "topology/tree" if shape.topology else "topology/none",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": f"{directory}/jobcomp.txt",
        "StateSaveLocation": f"{directory}/state",
        "SlurmctldPidFile": f"{directory}/run/slurmctld.pid",
        "SlurmctldLogFile": f"{directory}/log/slurmctld.log",
        "SlurmdPidFile": f"{directory}/run/slurmd.%n.pid",
        "SlurmdSpoolDir": f"{directory}/spool/%n",
        "SlurmdLogFile": slurmd_log(directory, "%n"),
    }
    if shape.accounting:
        settings |= {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": address}
        settings |= {"AccountingStoragePort": shape.accounting_port}
        settings |= {"AccountingStoragePass": f"{directory}/run/munge.socket"}  # the socket, with munge
    if shape.gpus:
        settings |= {"GresTypes": "gpu"}
    lines = [f"{setting}={value}" for setting, value in settings.items()]
    gres = f" Gres=gpu:{shape.gpus}" if shape.gpus else ""
    for node, at, port in zip(shape.names, shape.addresses, ports, strict=True):
        host = name if shape.plain else node
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr={at} Port={port} CPUs={CPUS} RealMemory=4000{gres}")
    lines.append(f"PartitionName=main Nodes={','.join(shape.names)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _slurmdbd_conf(directory: Path, shape: Shape) -> str:
    settings = {
        "DbdHost": shape.controller[0],
        "DbdAddr": shape.controller[1],  # jobs ask it, too
        "DbdPort": shape.accounting_port,
        "AuthInfo": f"socket={directory}/run/munge.socket",
        "SlurmUser": "root",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "PidFile": f"{directory}/run/slurmdbd.pid",
        "LogFile": f"{directory}/log/slurmdbd.log",
    }
    return "".join(f"{setting}={value}\n" for setting, value in settings.items())


def slurmd_log(directory: Path, node: str) -> str:
    return f"{directory}/log/slurmd.{node}.log"


def _topology(nodes: list[str]) -> str:
    """A tree: switches s1, s2, ... of two nodes each, and one above them."""
    pairs = [nodes[first : first + 2] for first in range(0, len(nodes), 2)]
    lines = [f"SwitchName=s{number} Nodes={','.join(pair)}" for number, pair in enumerate(pairs, 1)]
    return "\n".join([*lines, f"SwitchName=top Switches=s[1-{len(pairs)}]"]) + "\n"


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
