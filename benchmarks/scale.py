"""The load limits of a control store: view changes with thousands of groups, and the requests when nothing happens.

    python benchmarks/scale.py [--groups 8 64 512 2048] [--trials 5]

View changes: a real store process, the lowest groups' real leaders (threads; all of ``run.group_leader`` that agrees on a
view), and stand-ins for all other groups and for an agent of each (``scale_standins.py``). The notice that a group has died
is written; ``last_s`` is when the last of the others has read the next view. Fan-out: processes wait for one notice.

At rest: two real hosts on this machine train; what the second one's agent and ranks ask the store goes through a proxy that
counts. Then a line is laid through the view changes and carried on to 100,000 GPUs. Writes results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import common
import numpy as np

sys.path.insert(0, str(common.ROOT))
from megatron_ft.config.schema import RunConfig, placement_of
from megatron_ft.core.detection import link_detector
from megatron_ft.core.protocol import machine, signals
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.shell import carry_out
from megatron_ft.host.heartbeat import BEAT_S
from megatron_ft.record import history
from megatron_ft.record.history import History
from megatron_ft.run.group_leader import GroupLeader
from megatron_ft.run.store import ControlStore, watcher
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import Exit, View

ASKED = {"groups": 2048, "view_change_s": 2.0, "messages_per_group_and_second": 1.0}
PATIENCE_S, STEP = 120.0, 5
LISTENERS = (2048, 8192, 16384)
FAR = {"gpus": 100_000, "gpus_of_a_group": 64, "gpus_of_a_host": 8}


def main() -> None:
    common.give_secret()
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    rest = at_rest()
    print("at rest", rest, flush=True)
    changes = []
    for groups in options.groups:
        changes.append(view_changes(groups, min(options.trials, groups // 2 - 1)))
        print({key: value for key, value in changes[-1].items() if key != "trials"}, flush=True)
    fans = [fan_out(listeners, options.trials) for listeners in LISTENERS]
    print(*fans, sep="\n", flush=True)
    result = {
        "asked": ASKED,
        "at_rest": rest,
        "view_changes": changes,
        "fan_out": fans,
        "extrapolated": far(changes, fans),
    }
    print(json.dumps(result["extrapolated"], indent=1))
    print(f"raw numbers in {common.save('scale', result)}")


# --- view changes ------------------------------------------------------------------------------------------------------


_SERVES = """
import sys
from megatron_ft.run import store
server, port = store.host("127.0.0.1", 0)
print(port, flush=True)
sys.stdin.read()
"""


class Store:
    """A store process, and a run begun on it."""

    def __init__(self, view: View) -> None:
        command = [sys.executable, "-c", _SERVES]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT
        )
        self.address, self.run = f"127.0.0.1:{int(self._process.stdout.readline())}", uuid.uuid4().hex[:12]
        self.client = ControlStore(self.address, self.run, 60.0)
        self.client.begin()
        self.client.set("view/0", view.to_wire())

    def cpu_s(self) -> float:
        return common.cpu_s(self._process.pid)

    def close(self) -> None:
        self._process.communicate()


class StandIns:
    """A process of stand-ins; ``ready`` when all are connected."""

    def __init__(self, store: Store, view: View, **numbers: int) -> None:
        where = ["--store", store.address, "--run", store.run, "--view", json.dumps(view.to_wire())]
        sizes = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        command = [sys.executable, "benchmarks/scale_standins.py", *where, *sizes]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT
        )
        self.connections = self.line()["ready"]

    def line(self) -> dict[str, Any]:
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError("the stand-ins have ended")
        return json.loads(said)

    def close(self) -> None:
        self._process.communicate()


class Real:
    """A real leader in a thread, without ranks: it agrees on views, and has nothing else to do."""

    def __init__(self, me: int, config: RunConfig, store: ControlStore, directory: Path, view: View) -> None:
        rank = MagicMock(group=me, incarnation=0, size=1, inner=None, num_buckets=8, lost_because="")
        rank.nonfinite.stopped.return_value = None
        agreement = CoordinationClient(store.clone(), me, PATIENCE_S)
        self.leader = GroupLeader(rank, config, agreement, History(directory), placement_of(config), view)
        self.leader.enter(total=10**6, comes_back=False)
        self.had: dict[int, float] = {}
        self.failed: BaseException | None = None
        watcher.Watcher(store.clone(), self.leader.on_signal, lambda error: None).start()
        threading.Thread(target=self._work, daemon=True).start()

    def newest(self) -> int:
        """Return the newest epoch that this leader has entered; raise what has ended its thread."""
        if self.failed is not None:
            raise self.failed
        return max(self.had, default=-1)

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failed = error

    def _run(self) -> None:
        shell = self.leader._shell
        while True:
            carry_out(shell.hear())
            epoch = shell.state.view.epoch
            self.had.setdefault(epoch, time.time())
            if isinstance(shell.next, machine.AwaitView):
                carry_out(shell.turn())
            elif isinstance(shell.next, machine.Connect):
                carry_out(shell.feed(machine.Connected(epoch)))
            elif isinstance(shell.next, machine.Compute):
                carry_out(shell.feed(machine.Computed(shell.next.microbatch)))
            else:
                self.leader._store.wait(0.05)


def view_changes(groups: int, trials: int) -> dict[str, Any]:
    view = first_view(groups, STEP)
    config = RunConfig(groups=groups, microbatches_per_group=2)
    store, found = Store(view), []
    with tempfile.TemporaryDirectory() as directory:
        count = min(machine.Job(1, 1, 1, 1).collectors, groups // 2)
        reals = [Real(me, config, store.client, Path(directory), view) for me in range(count)]
        crowd = StandIns(store, view, first=count, groups=groups - count, dying=1, agents=groups)
        for trial in range(trials):
            victim, before = groups - 1 - trial, store.cpu_s()
            struck = time.time()
            exit_ = Exit(victim, 0, 1, f"host{victim}", "SIGKILL", None)
            watcher.announce(store.client, signals.RankExited(exit_))
            said = crowd.line()
            common.wait_until(lambda epoch=trial + 1: min([real.newest() for real in reals]) >= epoch, PATIENCE_S)
            times = [at - struck for at in (*said["times"], *(real.had[trial + 1] for real in reals))]
            numbers = {"first_s": min(times), "median_s": statistics.median(times), "last_s": max(times)}
            found.append({**numbers, "store_cpu_s": store.cpu_s() - before, "requests_so_far": said["requests"]})
            time.sleep(0.5)  # agents have asked by then
        assert len(view.live) - len(reals[0].leader._shell.state.view.live) == trials
        crowd.close()
        store.close()
    medians = {
        name: round(statistics.median(t[name] for t in found), 4) for name in ("median_s", "last_s", "store_cpu_s")
    }
    return {"groups": groups, "connections": crowd.connections + 2 * count, **medians, "trials": found}


def fan_out(listeners: int, trials: int) -> dict[str, Any]:
    """Write one notice; return the time until all of ``listeners`` waiting processes have it."""
    view = first_view(1, STEP)
    store, found = Store(view), []
    crowds = [StandIns(store, view, listeners=part) for part in _parts(listeners, 8192)]
    for trial in range(trials):
        struck = time.time()
        watcher.announce(store.client, signals.ViewAgreed(trial + 1))
        found.append(max(max(crowd.line()["times"]) for crowd in crowds) - struck)
    for crowd in crowds:
        crowd.close()
    store.close()
    return {"listeners": listeners, "last_s": round(statistics.median(found), 4), "trials": found}


def _parts(whole: int, most: int) -> list[int]:
    return [min(most, whole - begin) for begin in range(0, whole, most)]


# --- at rest -----------------------------------------------------------------------------------------------------------


class Proxy:
    """A proxy that passes everything on to the store, and counts the requests: a client sends one or two of them at
    once."""

    def __init__(self, port: int) -> None:
        self._port, self.sent, self.answered = port, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except ConnectionRefusedError:  # the store is not up yet; the client asks again
                client.close()
                continue
            for source, target, name in ((client, server, "sent"), (server, client, "answered")):
                threading.Thread(target=self._pump, args=(source, target, name), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, name: str) -> None:
        try:
            while data := source.recv(65536):
                setattr(self, name, getattr(self, name) + 1)
                target.sendall(data)
        except OSError:
            pass
        target.close()


def at_rest(seconds: float = 60.0) -> dict[str, Any]:
    """Count the messages between the store and a host with an agent and two groups of one rank, while steps are
    made."""
    with tempfile.TemporaryDirectory() as directory:
        # A directory for each host: with a common one, the second host would read the store's own address there.
        config, run_dirs = Path(directory) / "config.json", [Path(directory) / "run0", Path(directory) / "run1"]
        config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}))
        data = common.prepare_data(Path(directory) / "data")
        port = common.free_port()
        proxy = Proxy(port)
        model = ["--layers", "1", "--width", "32", "--seq-len", "32"]
        script = ["examples/pretrain_gpt/train.py", "--", "--data", str(data), "--steps", "1000000", *model]
        agents = []
        for rank, at in enumerate((port, proxy.port)):
            where = ["--hosts", "2", "--host-rank", str(rank), "--store", f"127.0.0.1:{at}", "--address", "127.0.0.1"]
            command = common.launch(4, config, run_dirs[rank], *where, *script)
            log = (Path(directory) / f"agent{rank}.log").open("w")
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            agents.append(subprocess.Popen(command, cwd=common.ROOT, env=environment, stdout=log, stderr=log))
        try:
            common.wait_until(
                lambda: any(line["step"] > STEP for line in common.of(history.read(run_dirs[0]), "step")), PATIENCE_S
            )
            steps, before = len(history.read(run_dirs[0])), (proxy.sent, proxy.answered)
            time.sleep(seconds)
            sent, answered = proxy.sent - before[0], proxy.answered - before[1]
            steps = len(history.read(run_dirs[0])) - steps
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait()
        if not proxy.sent:
            raise RuntimeError("nothing went through the proxy: the second host has found the store's own address")
        per_group = (sent + answered) / seconds / 2
        sizes = (8, 32, 64, 512, 2048)
        partners = {hosts: sum(link_detector.are_partners(0, peer, hosts) for peer in range(hosts)) for hosts in sizes}
        return {
            "seconds": seconds,
            "steps": steps,
            "requests": sent,
            "answers": answered,
            "messages_per_group_and_second": round(per_group, 3),
            "beats_per_host_and_second": {hosts: count / BEAT_S for hosts, count in partners.items()},
        }


# --- 100,000 GPUs ------------------------------------------------------------------------------------------------------


def far(changes: list[dict[str, Any]], fans: list[dict[str, Any]]) -> dict[str, Any]:
    """Extrapolate with lines through the two largest sizes of each."""
    groups = FAR["gpus"] // FAR["gpus_of_a_group"]
    listeners = FAR["gpus"] + FAR["gpus"] // FAR["gpus_of_a_host"]
    change = np.polyfit([c["groups"] for c in changes], [c["last_s"] for c in changes], 1)
    fan = np.polyfit([f["listeners"] for f in fans], [f["last_s"] for f in fans], 1)
    # A change is three notices for every process: the death, the new view, and the first report of a broken collective.
    notices_s = float(np.polyval(fan, listeners))
    return {
        **FAR,
        "groups": groups,
        "who_listens": listeners,
        "view_change_of_groups_s": round(float(np.polyval(change, groups)), 3),
        "a_notice_to_all_s": round(notices_s, 3),
        "connections_of_the_store": 3 * FAR["gpus"] + 2 * FAR["gpus"] // FAR["gpus_of_a_host"],
    }


if __name__ == "__main__":
    main()
