"""Real store servers for the tests: processes of their own, which can be killed, frozen and started again."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

# torch looks up the name of every address it connects to; a name server that is slow for a moment costs 1 s, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

DEADLINE_S = 60.0
"""Nothing here takes that long; a test that waits longer has failed."""


def await_(condition: Callable[[], object], what: str, patience_s: float = DEADLINE_S, every_s: float = 0.01) -> None:
    """Wait until the condition is true, looking often."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {patience_s:g} s"
        time.sleep(every_s)


def store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "megatron_ft-store"]


class Process:
    """One server. Signals go to the process that was started here, and to nothing else."""

    process: subprocess.Popen | multiprocessing.Process | None = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait() if isinstance(self.process, subprocess.Popen) else self.process.join()
            self.process = None

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        await_(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the server is stopped")

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.stores", "megatron_ft.run.store.tcp_store"])


class TcpServer(Process):
    """A control store in a process of its own, empty at every start, always on the same port. It is forked from one that
    has imported torch already."""

    def __init__(self) -> None:
        self._held = held_port()
        self.port = self._held.getsockname()[1]
        self.start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self) -> None:
        hear, tell = _FORKED.Pipe(duplex=False)
        self.process = _FORKED.Process(target=_serve, args=(self.port, tell), daemon=True)
        self.process.start()
        tell.close()
        self.port = hear.recv()


def _serve(port: int, tell: Connection) -> None:
    from megatron_ft.run.store import tcp_store

    server, port = tcp_store.host("127.0.0.1", port)
    tell.send(port)
    threading.Event().wait()
    del server


def held_port() -> socket.socket:
    """Return a port on which a server may listen again and again. This socket holds the port and does not listen; no
    other process gets the port meanwhile. Otherwise a client that tries to reach a dead server may be given that
    very port to call from, and be connected to itself."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def store_of(run_dir: Path) -> int:
    """Return the pid of the run's embedded store."""
    return json.loads((run_dir / "store.json").read_text())["pid"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class EtcdNode(Process):
    def __init__(self, name: str, directory: Path, port: int, cluster: str) -> None:
        self.name, self.port = name, port
        self._directory, self._cluster = directory, cluster

    def start(self) -> None:
        own = dict(pair.split("=") for pair in self._cluster.split(","))[self.name]
        url = f"http://127.0.0.1:{self.port}"
        options = {
            "--name": self.name,
            "--data-dir": str(self._directory / self.name),
            "--listen-client-urls": url,
            "--advertise-client-urls": url,
            "--listen-peer-urls": own,
            "--initial-advertise-peer-urls": own,
            "--initial-cluster": self._cluster,
            "--heartbeat-interval": "50",
            "--election-timeout": "500",
            "--logger": "zap",
        }
        with (self._directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["etcd", *(word for option in options.items() for word in option)], stdout=log, stderr=log
            )

    def leads(self) -> bool:
        status = self._status()
        return status.get("leader", "0") == status.get("header", {}).get("member_id")

    def follows(self) -> bool:
        """Return whether the node knows a leader, so that another node may be lost."""
        return self._status().get("leader", "0") != "0"

    def _status(self) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        try:
            connection.request("POST", "/v3/maintenance/status", "{}")
            return json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return {}
        finally:
            connection.close()


class EtcdCluster:
    """Three real nodes on loopback."""

    def __init__(self, directory: Path) -> None:
        self._held = [held_port() for _ in range(6)]
        ports = [held.getsockname()[1] for held in self._held]
        cluster = ",".join(f"n{i}=http://127.0.0.1:{ports[i]}" for i in range(3))
        self.nodes = [EtcdNode(f"n{i}", directory, ports[3 + i], cluster) for i in range(3)]
        self.address = "etcd://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            if node.process is None:
                node.start()
        self.leader()

    def leader(self) -> EtcdNode:
        found: list[EtcdNode] = []

        def look() -> bool:
            found[:] = [node for node in self.nodes if node.process is not None and node.leads()]
            return bool(found)

        await_(look, "etcd has a leader")
        return found[0]

    def follower(self) -> EtcdNode:
        leader = self.leader()
        return next(node for node in self.nodes if node is not leader)

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()

    def close(self) -> None:
        self.stop()
        for held in self._held:
            held.close()


def etcd_missing() -> str:
    """Return why the tests with etcd cannot run; empty when they can."""
    return "" if shutil.which("etcd") else "no etcd here; as root: apt-get install etcd-server"
