"""Whole training runs in SimGrid, with the policies of this package as the controllers.

    python tools/simgrid_run.py [--groups 200] [--steps 500] [--policies spare replication stacked_quota] [--seed 0]

A second opinion on ``megatron_ft/plan``: SimGrid's engine plays the groups, its network moves every message,
and nothing of our time axis is used. Each group is an actor on a host of its own. In a step it computes, then takes part in
an all-reduce along a binomial tree; a checkpoint goes to a storage host whose link all groups share. At the times of a
trace an actor is killed. When the loss is detected, the controller agrees with the survivors (a message to each and back),
asks the policy, has the patch computed and the all-reduce made again with the groups that are left; after a wipe-out it
ends all actors and starts them again. Then the same run, loss for loss, is made by our own simulator. Prints JSON.

SimGrid belongs to the system's Python (``simgrid_allreduce.python_with_simgrid``), so it runs in a process of its own, which
asks this one what the policy decides: one line of JSON for each question and each answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from math import gamma
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import simgrid_allreduce

TIMES = {"compute_s": 64.0, "message_s": 0.125, "latency_s": 1e-5, "detection_s": 1.0, "reconfigure_s": 0.2}
TIMES |= {"restart_s": 3600.0, "checkpoint_s": 60.0, "period_s": 3000.0}
"""SPARe's published setting (arXiv 2603.00357), with an all-reduce of 2 s for 129 to 256 groups: 16 messages in a row."""
MTBF_S, SHAPE, REDUNDANCY = 300.0, 0.78, {"spare": 9, "replication": 3, "stacked_quota": 9}
_RATE = 1e9
"""Bytes per second of every link, so that 10^9 bytes take a second."""


# --- this side: the policy, and our own simulator ---------------------------------------------------------------------


def compare(python: str, policy: str, groups: int, steps: int, seed: int) -> dict[str, Any]:
    """Return the time and the events of one run in SimGrid (``python`` can import it) and in our simulator."""
    from megatron_ft.plan.policy_models import POLICIES
    from megatron_ft.plan.training_run import simulate

    setting = _setting(policy, groups, steps, seed)
    case = {**TIMES, "groups": groups, "steps": steps, "trace": setting.failures.trace}
    played = _play(python, case, POLICIES[policy](setting))
    model = POLICIES[policy](setting)
    model.plans_restarts = False  # a restart that the planner wants although the run could go on
    ours = simulate(setting, policy, 0, model)
    names = ("time_s", "masked", "wipe_outs", "checkpoints")
    found = {name: {"simgrid": played[name], "ours": getattr(ours, name)} for name in names}
    return {"policy": policy, **found, "simgrid_over_ours": played["time_s"] / ours.time_s}


def _setting(policy: str, groups: int, steps: int, seed: int) -> Any:
    import numpy as np

    from megatron_ft.plan.cluster import Cluster
    from megatron_ft.plan.setting import Failures, Setting
    from tools.allreduce import allreduce_s

    dice, count = np.random.default_rng(seed), 20 * steps
    gaps = MTBF_S / gamma(1 + 1 / SHAPE) * dice.weibull(SHAPE, count)
    trace = tuple(zip(np.cumsum(gaps).tolist(), dice.integers(groups, size=count).tolist(), strict=True))
    reduce_s = allreduce_s(groups, TIMES["message_s"], 1.0, TIMES["latency_s"], "tree")
    cluster = Cluster(
        gpus=groups, gpus_per_group=1, gpus_per_node=1, mtbf_s=MTBF_S, steps=steps, microbatches=16, rejoin_s=None,
        step_s=TIMES["compute_s"] + reduce_s, allreduce_s=reduce_s, restart_s=TIMES["restart_s"],
        checkpoint_s=TIMES["checkpoint_s"], detection_s=TIMES["detection_s"], reconfigure_s=TIMES["reconfigure_s"],
    )  # fmt: skip
    return Setting(
        cluster=cluster, redundancy=REDUNDANCY[policy], failures=Failures(trace=trace), jitter=0.0, in_restart="none",
        period_s=TIMES["period_s"], hosted=False,
    )  # fmt: skip


def _play(python: str, case: dict[str, Any], policy: Any) -> dict[str, Any]:
    """Run this file in the other Python, and answer its questions."""
    command = [python, __file__, "--in-simgrid"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        tell = lambda what: print(json.dumps(what), file=process.stdin, flush=True)  # noqa: E731
        tell(case)
        for line in process.stdout:
            asked = json.loads(line)
            match asked["ask"]:
                case "step":
                    policy.begin_step()
                    tell(policy.stacks())
                case "lose":
                    loss = policy.lose(asked["groups"])
                    tell([loss.patch, loss.wiped_out])
                case "restart":
                    policy.restart()
                    tell(None)
                case "done":
                    return asked["result"]
    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} before its run was over")


# --- the other side: groups, network and storage in SimGrid -----------------------------------------------------------


def _ask(what: str, **more: Any) -> Any:
    print(json.dumps({"ask": what, **more}), flush=True)
    return json.loads(sys.stdin.readline())


class World:
    """The groups and their controller. One actor per live group works off the orders for it; ``happened`` counts what
    the controller waits for: groups that are done, and losses that are detected."""

    def __init__(self, case: dict[str, Any], hosts: list[Any]) -> None:
        from simgrid import Semaphore

        self.case, self.hosts = case, hosts
        self.happened = Semaphore(0)
        self.epoch = self.orders = 0
        self.live: dict[int, Any] = {}  # the groups that are not lost, with their actors
        self.members: set[int] = set()  # those that take part: a loss is not known before it is detected
        self.gone: list[int] = []
        self.done: set[int] = set()
        self.count = dict.fromkeys(("masked", "wipe_outs", "checkpoints"), 0)
        self.over = False

    # --- a group ------------------------------------------------------------------------------------------------------

    def start(self, group: int, what: Any, *arguments: Any) -> None:
        from simgrid import Actor

        self.live[group] = Actor.create(f"{group}", self.hosts[group], self._work, group, self.orders, what, *arguments)

    def _work(self, group: int, number: int, what: Any, *arguments: Any) -> None:
        from simgrid import NetworkFailureException

        try:
            what(group, *arguments)
        except NetworkFailureException:
            return  # the other end is lost, or was ended; the controller decides what follows
        if number == self.orders:
            self.done.add(group)
            self.happened.release()

    def compute(self, group: int, seconds: float) -> None:
        from simgrid import this_actor

        this_actor.execute(seconds * simgrid_allreduce.SPEED)

    def reduce(self, group: int, members: list[int]) -> None:
        """Take part in an all-reduce along a binomial tree: sums to the first member, the result back from it."""
        simgrid_allreduce.tree(self.epoch, members.index(group), len(members), int(self.case["message_s"] * _RATE))

    def save(self, group: int, share: float) -> None:
        from simgrid import Comm

        Comm.sendto(self.hosts[group], self.hosts[-1], int(share * _RATE))

    # --- losses -------------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Kill groups at the times of the trace. A group that is not there cannot be lost."""
        from simgrid import Engine, this_actor

        for at, group in self.case["trace"]:
            this_actor.sleep_until(max(at, Engine.clock))
            if self.over:
                return
            if self.live.get(group) is not None:
                self.live.pop(group).kill()
                self._detect(group)

    def _detect(self, group: int) -> None:
        from simgrid import Actor, this_actor

        def after_a_while(epoch: int) -> None:
            this_actor.sleep_for(self.case["detection_s"])
            if epoch == self.count["wipe_outs"]:
                self.gone.append(group)
                self.happened.release()

        Actor.create(f"watch {group}", self.hosts[-1], after_a_while, self.count["wipe_outs"])

    # --- the controller -----------------------------------------------------------------------------------------------

    def order(self, what: Any, *arguments: Any) -> None:
        """Have all live groups do something, and wait until those that are not lost meanwhile have done it, or, for an
        all-reduce, until a loss is detected: without the group it may never end."""
        self.orders += 1
        self.epoch += 1
        self.done.clear()
        ordered = list(self.live)
        for group in ordered:
            self.start(group, what, *arguments)
        while not (what == self.reduce and self.gone) and not (self.live.keys() & set(ordered)) <= self.done:
            self.happened.acquire()

    def control(self) -> None:
        from simgrid import Engine, this_actor

        case, everybody = self.case, range(self.case["groups"])
        self.live, self.members = dict.fromkeys(everybody), set(everybody)
        step = saved = 0
        saved_at = 0.0
        while step < case["steps"]:
            if Engine.clock - saved_at >= case["period_s"]:
                self.order(self.save, case["checkpoint_s"] / len(self.live))
                self.count["checkpoints"] += 1
                saved, saved_at = step, Engine.clock
            if self._step():
                step += 1
                continue
            self.count["wipe_outs"] += 1
            self._end_all()
            this_actor.sleep_for(case["restart_s"])
            self.gone.clear()
            self.live, self.members = dict.fromkeys(everybody), set(everybody)
            _ask("restart")
            step, saved_at = saved, Engine.clock
        self.over = True
        result = {"time_s": Engine.clock, **self.count}
        print(json.dumps({"ask": "done", "result": result}), flush=True)

    def _step(self) -> bool:
        """Make one step; False after a wipe-out."""
        case = self.case
        self.order(self.compute, _ask("step") * case["compute_s"])
        while True:
            self.order(self.reduce, sorted(self.members))
            if not self.gone:
                return True
            self._end_all()
            self._agree()
            lost, self.gone = self.gone, []
            self.members -= set(lost)
            patch, wiped_out = _ask("lose", groups=sorted(lost))
            if wiped_out:
                return False
            self.count["masked"] += len(lost)
            if patch:
                self.order(self.compute, patch * case["compute_s"])

    def _end_all(self) -> None:
        """End what the live groups are doing."""
        for actor in self.live.values():
            if actor is not None:
                actor.kill()

    def _agree(self) -> None:
        """A message to every survivor and one back, and the time in which the new communicator is made."""
        from simgrid import Comm, this_actor

        for ends in ((0, 1), (1, 0)):
            hosts = [(self.hosts[-1], self.hosts[group]) for group in self.live]
            Comm.wait_all([Comm.sendto_async(pair[ends[0]], pair[ends[1]], 0) for pair in hosts])
        this_actor.sleep_for(self.case["reconfigure_s"])


def _in_simgrid() -> None:
    from simgrid import Actor, Engine

    # Every actor is a thread, and only one of them runs at a time: on one core the change takes a fifth of the time.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    case = json.loads(sys.stdin.readline())
    settings = [f"--cfg={setting}" for setting in simgrid_allreduce.MODELS["plain"]]
    engine = Engine(["simgrid_run", "--log=root.thresh:critical", *settings])
    # The last host is the storage, and the controller's.
    network = {
        "hosts": case["groups"] + 1,
        "bandwidth": _RATE,
        "latency": case["latency_s"],
        "slowdown": 1.0,
        "slow_host": 0,
    }
    hosts = simgrid_allreduce.platform(network)
    world = World(case, hosts)
    Actor.create("controller", hosts[-1], world.control)
    Actor.create("failures", hosts[-1], world.strike).daemonize()
    engine.run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="simgrid_run", description="Whole runs in SimGrid and in our simulator.")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--policies", nargs="+", default=list(REDUNDANCY), choices=list(REDUNDANCY))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-simgrid", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_simgrid:
        _in_simgrid()
        return 0
    python = simgrid_allreduce.python_with_simgrid()
    if python is None:
        print("simgrid_run: no SimGrid here; as root: apt-get install python3-simgrid", file=sys.stderr)
        return 2
    runs = [compare(python, name, options.groups, options.steps, options.seed) for name in options.policies]
    print(json.dumps({"groups": options.groups, "steps": options.steps, **TIMES, "runs": runs}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
