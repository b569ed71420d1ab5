"""Runs the case files of this folder; README.md describes their format.

The first command of a case chooses one of two worlds, and the methods of that world's class are the other commands: the
method ``link_down`` is the command ``link-down``, and its docstring begins with its usage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.machine import Job
from megatron_ft.core.replication.placement import consecutive, golomb, sets
from megatron_ft.core.scheduling import policies
from megatron_ft.core.scheduling.assignment import fetched, microbatches_of_step
from megatron_ft.proof.explore import tell
from megatron_ft.proof.scenario import KINDS, Fault, Scenario
from megatron_ft.proof.simulated_cluster import play
from megatron_ft.types import Microbatch
from tests.world import Group, World

MARK = "----"


class CaseError(Exception):
    """A case file that cannot be run: names the file, the line, the command and what is wrong."""


def rewritten(name: str, text: str) -> str:
    """Returns the text of a case file with the output that its commands have now.

    Raises:
        CaseError: A command is unknown or misused, or the world found a violation while it ran.
    """
    case, lines, output = Case(), [], []
    old_output = False
    for number, line in enumerate([*text.rstrip("\n").splitlines(), ""], start=1):
        if not line.strip():
            lines += [MARK, *output, ""] if output else [""]
            old_output, output = False, []
        elif line == MARK:
            old_output = True
        elif line.startswith("#") and not old_output:
            lines.append(line)
        elif not old_output:
            lines.append(line)
            try:
                output += case.perform(line)
            except Exception as error:  # whatever goes wrong, its place in the file is what helps
                raise CaseError(f"{name}:{number}: `{line}`: {error or type(error).__name__}") from error
    if case.last != "end":
        raise CaseError(f"{name}:{number - 1}: the last command is `{case.last}`, it has to be `end`")
    return "\n".join(lines)


class Case:
    """Finds the method of a command and calls it with the command's words."""

    def __init__(self) -> None:
        self.world: StepProtocol | FailOver | None = None
        self.last = ""

    def perform(self, line: str) -> list[str]:
        """Carries out one command and returns what it prints."""
        self.last, *words = line.split()
        known = WORLDS if self.world is None else commands(self.world)
        if self.last not in known:
            when = "a case begins with one of" if self.world is None else "the commands are"
            raise CaseError(f"there is no such command here; {when}:\n  " + "\n  ".join(map(usage, known.values())))
        arguments = [_number(word) for word in words if "=" not in word]
        options = {key: _number(value) for key, value in (word.split("=", 1) for word in words if "=" in word)}
        command = known[self.last]
        try:
            inspect.signature(command).bind(*arguments, **options)
        except TypeError as error:
            raise CaseError(f"{error}; usage: {usage(command)}") from None
        result = command(*arguments, **options)
        if self.world is None:
            self.world = result
        output, self.world.log[:] = list(self.world.log), []
        return output


def commands(world: object) -> dict[str, Callable[..., None]]:
    """Returns the commands of a world (an instance, or its class) by name."""
    methods = inspect.getmembers(world, callable)
    return {name.replace("_", "-"): method for name, method in methods if not name.startswith("_")}


def usage(command: Callable[..., object]) -> str:
    """Returns the first sentence of a command's docstring: its words, a colon, and what it does."""
    return " ".join((command.__doc__ or "").split("\n\n")[0].split())


def _number(word: str) -> int | str:
    return int(word) if word.isdigit() else word


def _names(groups) -> str:
    return " ".join(map(str, groups)) or "none"


class StepProtocol:
    """groups COUNT [microbatches=1] [buckets=4] [steps=2] [min_groups=1] [redundancy=COUNT] [straggler_steps=3]
    [policy=stacked_quota] [standby=none]: a job of COUNT groups; each is about to compute its first microbatch. The
    policies are those of a config; standby is none or slack.
    """

    def __init__(
        self,
        count: int,
        *,
        microbatches=1,
        buckets=4,
        steps=2,
        min_groups=1,
        redundancy=0,
        straggler_steps=3,
        policy=policies.STACKED_QUOTA,
        standby="none",
    ) -> None:
        if policy not in policies.POLICIES:
            raise CaseError(f"there is no policy {policy} here; policies: {', '.join(policies.POLICIES)}")
        self.log: list[str] = []
        place = {policies.SPARE: golomb, policies.REPLICATION: sets}.get(policy, consecutive)
        placement = place(count, redundancy) if redundancy else None
        found = policies.policy(policy, copies=redundancy or 1, slack=standby == policies.SLACK)
        job = Job(
            count, microbatches, buckets, steps, min_groups,
            placement=placement, straggler_steps=straggler_steps, policy=found,
        )  # fmt: skip
        self._world = World(job, log=self.log)
        self._play(lambda: self._all_are(machine.Compute))
        self.log.clear()

    def _group(self, me: int) -> Group:
        if me not in self._world.alive:
            raise CaseError(f"there is no live group {me}; live: {_names(sorted(self._world.alive))}")
        return self._world.alive[me]

    def _groups(self, chosen: tuple[int, ...] = ()) -> list[tuple[int, Group]]:
        return [(me, self._group(me)) for me in chosen or sorted(self._world.alive)]

    def _all_are(self, action: type) -> bool:
        return all(isinstance(group.action, action) for _, group in self._groups())

    def _play(self, until: Callable[[], bool]) -> None:
        self._world.play(until)
        if not until():
            raise CaseError("nothing moves any more, and the condition does not hold")

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill(self, group: int, *more: int) -> None:
        """kill GROUP...: the processes of the groups die, and their agents report it."""
        for me in (group, *more):
            if me in self._world.seekers and me not in self._world.alive:
                self._world.kill_seeker(me)
            else:
                self._group(me)
                self._world.kill(me)

    def accuse(self, group: int) -> None:
        """accuse GROUP: an agent reports that the group is dead, although it lives."""
        self._group(group)
        self._world.accuse(group)

    def cut_off(self, group: int, *others: int) -> None:
        """cut-off GROUP OTHER...: the group hears nothing of the others and takes them for dead."""
        words = [str(other) for other in others]
        self.log.append(f"{group} hears nothing of {', '.join(words[:-1])} and {words[-1]} and takes them for dead")
        for other in others:
            self._world.feed(group, machine.GroupFailed(other, f"no heartbeat from group {other}"))

    def leave(self, group: int) -> None:
        """leave GROUP: the group is told to leave after its present step."""
        self._group(group)
        self._world.leave(group)

    def freeze(self, group: int, *more: int) -> None:
        """freeze GROUP...: the processes stop (SIGSTOP); nothing reports it."""
        for me, _ in self._groups((group, *more)):
            self._world.freeze(me)

    def thaw(self, group: int, *more: int) -> None:
        """thaw GROUP...: the frozen processes go on."""
        for me, _ in self._groups((group, *more)):
            self._world.thaw(me)

    def wake_old(self, group: int) -> None:
        """wake-old GROUP: the frozen process of an older start of the group goes on as far as it can."""
        self._world.wake_ghost(group)

    def link_down(self, host: int | str, other: int | str) -> None:
        """link-down HOST OTHER: the host reports that it hears nothing of the other; a host is its groups (0, or 0+1)."""
        self._world.miss(_host(host), _host(other))

    def link_up(self, host: int | str, other: int | str) -> None:
        """link-up HOST OTHER: the host reports that it hears the other again."""
        self._world.miss(_host(host), _host(other), heard=True)

    def reset(self, group: int) -> None:
        """reset GROUP: a connection of the group breaks, and the group reports it."""
        self._group(group)
        self._world.reset(group)

    def disconnect(self, group: int, *more: int) -> None:
        """disconnect GROUP...: the connections of the groups break; no report is written."""
        for me, member in self._groups((group, *more)):
            self._world.feed(me, machine.EpochAborted(member.state.view.epoch, "connection reset"))

    def store(self, state: str) -> None:
        """store down|up: the control store is unreachable, or reachable again."""
        {"down": self._world.store_away, "up": self._world.store_back}[state]()

    def poison(self, microbatch: str) -> None:
        """poison MICROBATCH: every group that computes this microbatch (as in 0/3.0) dies of it."""
        self._world.poison = Microbatch.parse(microbatch)

    def slow(self, group: int, factor: int | str) -> None:
        """slow GROUP FACTOR: the group needs this many times as long for a microbatch as the others."""
        self._world.rates[group] = float(factor)

    # --- joining ------------------------------------------------------------------------------------------------------

    def come(self, group: int, *donors: int) -> None:
        """come GROUP [DONOR...]: a new start of the group begins to receive the state of the donors (default: the lowest
        group)."""
        self._groups(donors)
        self._world.come(group, *donors)

    def back(self, group: int, *donors: int) -> None:
        """back GROUP [DONOR...]: as `come`, and the group goes on until it has asked to join."""
        self._groups(donors)
        self._world.back(group, *donors)

    def differ(self, group: int, *more: int) -> None:
        """differ GROUP...: the next start of each group enters with another state, the same in all of them: it lacks what
        only its script knows."""
        self._world.differing |= {group, *more}

    def hold(self, group: int) -> None:
        """hold GROUP: what donors send to the joining group does not arrive for now."""
        self._world.held.add(group)

    def release(self, group: int) -> None:
        """release GROUP: what donors have sent to the joining group arrives."""
        self._world.held.discard(group)

    def drop(self, group: int, donor: int) -> None:
        """drop GROUP DONOR: what the donor has sent to the joining group and has not arrived is lost."""
        self._world.lose(group, donor)

    def move(self, group: int) -> None:
        """move GROUP: another host takes the group over with its next start."""
        self._world.move(group)

    # --- schedule -----------------------------------------------------------------------------------------------------

    def deliver(self, *groups: int) -> None:
        """deliver [GROUP...]: the groups (default: all) read all notices that they have not read."""
        for me, _ in self._groups(groups):
            while self._world.pending(me):
                self._world.notice(me)

    def deaf(self, group: int, *more: int) -> None:
        """deaf GROUP...: the groups read no notices for now."""
        self._world.deaf |= {me for me, _ in self._groups((group, *more))}

    def hear(self, group: int, *more: int) -> None:
        """hear GROUP...: the groups read notices again."""
        self._world.deaf -= {group, *more}

    def act(self, group: int, *, times: int = 1) -> None:
        """act GROUP [times=1]: the group carries out its present action, then its next one, as often as given."""
        for _ in range(times):
            joins = group in self._world.seekers and group not in self._world.alive
            if not (self._world.seek(group) if joins else self._group(group) and self._world.act(group)):
                raise CaseError(f"group {group} can only wait: {'it joins' if joins else self._group(group).action}")

    def reduce(self, *words: int | str) -> None:
        """reduce [bucket BUCKET... at GROUP...]: the groups one after the other see the all-reduces of these buckets finish;
        without words, all groups compute and start all their all-reduces, and no all-reduce finishes.
        """
        if not words:
            self._play(lambda: self._all_are(machine.Reduce))
            for me, _ in self._groups():
                self._world.arrive(me)
            return
        if words[0] != "bucket" or "at" not in words:
            raise CaseError(f"usage: {usage(self.reduce)}")
        at = words.index("at")
        for me, group in self._groups(words[at + 1 :]):
            for bucket in words[1:at]:
                self.act(me)
                if bucket not in group.reduced:
                    raise CaseError(f"group {me} has not seen bucket {bucket} finish, but {_names(group.reduced)}")

    def adopt(self, epoch: int) -> None:
        """adopt EPOCH: all groups read all notices and act until each has adopted the view of this epoch, or has stopped."""
        self.deliver()
        for _ in range(1000):
            able = [(me, group.state) for me, group in self._groups() if me not in self._world.frozen]
            late = [me for me, state in able if state.view.epoch < epoch and not state.stopped]
            if not late:
                return
            for me in late:
                self._world.act(me)
        raise CaseError(f"groups {_names(late)} do not adopt view {epoch}")

    def until(self, condition: str, *of: int) -> None:
        """until written EPOCH | committed STEPS | reported [GROUP...] | patch GROUP | member GROUP | synced GROUP |
        gone GROUP: all groups follow the protocol until a view is written; all groups have committed that number of steps;
        the groups have reported; the group is about to compute a microbatch of a lost group; the newest start of the group
        is a member; it also has the model state; the group neither lives nor joins.
        """
        world, first = self._world, of[0] if of else None

        def member() -> bool:
            group = world.alive.get(first)
            return group is not None and group.state.incarnation == world.starts.get(first, 0)

        conditions: dict[str, Callable[[], bool]] = {
            "written": lambda: first in world.views,
            "committed": lambda: all(len(group.committed) >= first for _, group in self._groups()),
            "reported": lambda: all(group.state.reported for _, group in self._groups(of)),
            "patch": lambda: getattr(self._group(first).action, "patch", False),
            "member": member,
            "synced": lambda: member() and world.alive[first].state.synced,
            "gone": lambda: first not in world.alive and first not in world.seekers,
        }
        if condition not in conditions or (first is None and condition != "reported"):
            raise CaseError(f"usage: {usage(self.until)}")
        self._play(conditions[condition])

    def wait(self, seconds: int) -> None:
        """wait SECONDS: time passes; groups that wait for a view look for it every second."""
        self._world.wait(seconds)

    def run(self) -> None:
        """run: all groups follow the protocol until nothing moves any more."""
        self._world.play()

    # --- what a case shows besides what happens -----------------------------------------------------------------------

    def plan(self, group: int) -> None:
        """plan GROUP: prints how the group plans its present step, and which shards' samples have to be fetched for it."""
        state = self._group(group).state
        for me, own in sorted(state.plan.assignment.items()):
            self.log.append(f"{me} has {len(own)} of step {state.step}: {_names(state.plan.of(me))}")
            shards = sorted({microbatch.shard for microbatch in fetched(own, me, self._world.job.placement)})
            self.log += [f"{me} has to fetch samples of shard {shard}" for shard in shards]

    def sums(self, epoch: int, step: int) -> None:
        """sums EPOCH STEP: prints what each group has added to the buckets of the step in the epoch (first attempt)."""
        for bucket in range(self._world.job.buckets):
            parts = self._world.arrived.get((epoch, step, 0, bucket), {})
            said = ", ".join(f"{_names(sorted(part))} by {me}" for me, part in sorted(parts.items()))
            self.log.append(f"bucket {bucket}: {said or 'not reduced'}")

    def speeds(self, group: int, *more: int) -> None:
        """speeds GROUP...: prints which groups are slow, as these groups know it."""
        for me, member in self._groups((group, *more)):
            slow = [f"{other} takes {factor:g} times as long" for other, factor in member.state.speeds.slow.items()]
            self.log.append(f"{me} knows: {', '.join(slow) or 'no group is slow'}")

    def versions(self) -> None:
        """versions: prints the epochs in which the buckets of each group's committed steps were reduced."""
        for me, group in sorted((self._world.ended | self._world.alive).items()):
            for step, buckets in enumerate(group.done):
                self.log.append(f"{me} has step {step} of epochs {_names(bucket.epoch for bucket in buckets)}")

    def end(self) -> None:
        """end: checks that all live groups have finished or stopped and that every committed step is whole, then prints how
        each group ended and all views. The last command of every case.
        """
        world = self._world
        world.check_end()
        for me, group in sorted((world.ended | world.alive).items()):
            for step, buckets in enumerate(group.committed):
                whole = frozenset(microbatches_of_step(step, world.job.shards, world.job.per_shard))
                counted = buckets[0] if world.job.policy.shrinks else whole
                assert buckets == (counted,) * world.job.buckets, (
                    f"step {step} of group {me} is not the sum of the step"
                )
                if counted != whole:
                    self.log.append(f"group {me} sums {len(counted)} of {len(whole)} microbatches in step {step}")
            how = "ends" if me in world.alive else "is gone"
            if group.state.stopped:
                how = f"stops: {group.state.stopped}"
            steps = len(group.committed)
            self.log.append(f"group {me} {how} after {steps} committed step{'' if steps == 1 else 's'}")
        self.log += [_view(world.views[epoch]) for epoch in sorted(world.views) if epoch]
        if world.saved:
            group, step = max(world.saved, key=lambda one: one[1])
            self.log.append(f"the job goes on with step {step}, from what group {group} has saved")
        if world.entries:
            self.log.append("joins: " + ", ".join(f"{count} {what}" for what, count in sorted(world.entries.items())))


def _host(name: int | str) -> tuple[int, ...]:
    return tuple(int(group) for group in str(name).split("+"))


def _view(view) -> str:
    """Returns a view in one line; 3.1 is the start of group 3 after its first."""
    seats = (f"{group}.{view.incarnations[group]}" if group in view.incarnations else group for group in view.live)
    parts = [f"view {view.epoch} of step {view.step}: live {_names(seats)}"]
    parts += [f"lost {group} ({why})" for group, why in sorted(view.lost.items())]
    parts += [f"joined {_names(view.joined)}"] if view.joined else []
    parts += [f"final buckets {_names(view.final)}"] if view.final else []
    parts += [f"{view.final[bucket]} gives bucket {bucket} to {_names(to)}" for bucket, to in view.missing.items()]
    parts += [f"{view.source} gives its state to {_names(view.behind)}"] if view.behind else []
    return "; ".join(parts)


class FailOver:
    """hosts COUNT [spares=0]: a job of one group on each of COUNT hosts, and spare hosts without a group; host 0 has the
    control store.
    """

    def __init__(self, count: int, *, spares: int = 0) -> None:
        self.log: list[str] = []
        self._scenario = Scenario(1, count, 1, 1, 4, spare_hosts=spares)
        self._events: list[dict] = []

    def at(self, seconds: int | str, *words: int | str) -> None:
        """at SECONDS KIND [TARGET...] [for SECONDS]: a fault; `Fault` in
        `megatron_ft/proof/scenario.py` lists the kinds."""
        words, lasts = (words[:-2], float(words[-1])) if "for" in words[-2:] else (words, 0.0)
        kind = " ".join(word for word in words if isinstance(word, str))
        targets = tuple(word for word in words if isinstance(word, int))
        if kind not in KINDS:
            raise CaseError(f"there is no fault {kind!r}; faults: {', '.join(KINDS)}")
        fault = Fault(float(seconds), kind, targets, lasts)
        self._scenario = replace(self._scenario, faults=(*self._scenario.faults, fault))

    def run(self) -> None:
        """run: the job runs to its end, with the faults."""
        history = play(self._scenario)
        assert not history.violations, history.violations
        self._events = history.lines
        self.log += [line for line in list(tell(history))[1:-1] if " part group " not in line]

    def end(self) -> None:
        """end: prints how many steps each group has committed. The last command of every case."""
        commits = [line["group"] for line in self._events if line["event"] == "commit"]
        self.log += [f"group {group} has committed {commits.count(group)} steps" for group in sorted(set(commits))]


WORLDS: dict[str, Callable[..., StepProtocol | FailOver]] = {"groups": StepProtocol, "hosts": FailOver}
