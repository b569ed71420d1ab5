"""Replay must follow any run that keeps the protocol, wherever it is cut off, and see every decision that was changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_ft.config import schema
from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.core.protocol.shell import resumes
from megatron_ft.proof.replay import replay
from megatron_ft.record import history
from megatron_ft.record.protocol_trace import Line, Record, RecordError
from megatron_ft.run.recovery_metrics import RecoveryMetrics
from megatron_ft.types import PlanOrigin, Report, View
from tests import support
from tests.world import Group, World
from tools.replay import main


class RecordedWorld(World):
    """The malicious world, writing the record of a real run with the runtime's own writers."""

    def __init__(self, directory: Path, run: schema.RunConfig, buckets: int, steps: int, seed: int) -> None:
        super().__init__(schema.job_of(run, schema.placement_of(run), buckets=buckets, steps=steps), seed)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"run_id": "world", **run.to_json()}))
        self.directory = directory
        self.measured: dict[int, dict[str, float]] = {}
        self.books: dict[int, tuple[history.History, RecoveryMetrics]] = {}
        for me in self.alive:
            self.open(me, self.views[0])

    def open(self, me: int, view: View) -> None:
        lines = history.History(self.directory)
        self.books[me] = lines, RecoveryMetrics(lines, me)
        lines.set_writer(me == min(view.live))
        lines.record("begin", steps=self.job.steps, microbatches=self.job.microbatches, buckets=self.job.buckets)
        lines.record("view", **view.to_json())

    @property
    def lines(self) -> list[dict]:
        return history.read(self.directory)

    def seat(self, me: int, view: View) -> None:
        waiting = me in self.seekers
        super().seat(me, view)
        if waiting and me not in self.seekers:
            self.open(me, view)

    def act(self, me: int, ticks: bool = False) -> bool:
        group = self.alive[me]
        if resumes(group.state, group.action):
            self.books[me][1].resumed(group.state)
        return super().act(me, ticks)

    def hears(self, group: Group, event: machine.Event) -> None:
        state, (lines, account) = group.state, self.books[group.me]
        caught_up = (
            isinstance(event, machine.Transferred) and state.next_plan_origin and event.epoch == state.view.epoch
        )
        if isinstance(event, machine.Updated) or caught_up and not state.reported:
            live, count = list(state.view.live), self.job.microbatches
            if isinstance(event, machine.Updated):
                self.measured[state.step] = {str(group): seconds for group, seconds in sorted(event.measured.items())}
            measured = {"measured": self.measured[state.step]} if self.job.straggler_factor else {}
            lines.record("step", step=state.step, microbatches=count, epoch=state.view.epoch, live=live, **measured)
            account.begin_step()

    def adopts(self, group: Group, view: View) -> None:
        if group.me in view.live:
            lines, account = self.books[group.me]
            lines.set_writer(group.me == min(view.live))
            lines.record("view", **view.to_json())
            account.noticed()
            account.adopted(view)

    def end(self) -> None:
        if any(isinstance(group.action, machine.Finish) for group in self.alive.values()):
            history.append(self.directory, "end", step=self.job.steps - 1)


def a_run(directory: Path, seed: int, **section: object) -> RecordedWorld:
    groups, kind = 3 + seed % 3, ("full", "golomb", "consecutive")[seed % 3]
    section = {"gradient_accumulation_steps": 2, "fault_tolerance": {"placement": kind, **section}}
    world = RecordedWorld(directory, schema.resolve(section, groups=groups), buckets=3, steps=6, seed=seed)
    world.run(kills=1 + seed % groups, joins=seed % 2 * 2)
    world.end()
    return world


def same(directory: Path) -> Record:
    """Check that the record is decided again in the same way."""
    record = Record.load(directory)
    result = replay(record)
    assert not result.different and not result.stopped, (result, (directory / history.FILE).read_text())
    assert result.count("view") == len(record.views) and result.count("step") == len(record.steps)
    assert result.count("recovery") == len(record.recoveries)
    return record


# --- a record is decided again ----------------------------------------------------------------------------------------


def test_every_random_run_is_decided_again(tmp_path):
    seen = {"final": 0, "behind": 0, "recoveries": 0, "slow": 0, "joined": 0, "followed": 0}
    for seed in range(40):
        world = a_run(tmp_path / str(seed), seed)
        record = same(tmp_path / str(seed))
        assert record.ended
        seen["slow"] += any(group.state.speeds.slow for group in world.alive.values())
        seen["final"] += sum(bool(line.view.final) for line in record.views)
        seen["behind"] += sum(bool(line.view.behind) for line in record.views[1:])
        seen["joined"] += sum(bool(line.view.joined) for line in record.views)
        seen["followed"] += world.entries["followed"]
        seen["recoveries"] += len(record.recoveries)
    assert all(seen.values()), seen


def test_a_microbatch_that_is_promoted_and_then_lost_again_is_taken_over_twice(tmp_path):
    """Chaos seed 36: the group whose standby work was promoted died in the same step, and another computed it anew."""
    twice = 0
    for seed in range(24):
        a_run(tmp_path / str(seed), seed, policy="spare", placement="full")
        record = same(tmp_path / str(seed))
        lines = [line.fields for line in record.recoveries]
        twice += any(a["promoted"] and a["step"] == b["step"] and b["patched"] for a, b in pairwise(lines))
    assert twice


def test_a_run_that_did_not_measure_is_decided_again_and_measurements_decide(tmp_path):
    """A measurement that the record lacks was not made, and then no group is slow; if a group was, the plans were
    others."""
    differs = 0
    for seed in range(20):
        world = a_run(tmp_path / str(seed), seed)
        path = world.directory / history.FILE
        lines = [{k: v for k, v in line.items() if k != "measured"} for line in world.lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = replay(Record.load(world.directory))
        differs += bool(result.different)
    assert 0 < differs < 20


@pytest.mark.parametrize("measured", [[1.0], {"a": 1.0}, {"0": "fast"}, {"-1": 1.0}, {"0": -1.0}, 3])
def test_damaged_measurements_are_reported(tmp_path, measured):
    world = a_run(tmp_path / "run", 0)
    path = world.directory / history.FILE
    lines = [{**line, "measured": measured} if line["event"] == "step" else line for line in world.lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordError, match="must give the seconds of a microbatch for each group"):
        Record.load(world.directory)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_cut_off_anywhere_is_decided_again_as_far_as_it_goes(tmp_path, seed):
    path = a_run(tmp_path / "run", seed).directory / history.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    for count in range(2, len(lines)):  # without a view there is nothing to decide
        path.write_bytes(b"".join(lines[:count]) + lines[count][:20])
        assert not same(tmp_path / "run").ended


def test_groups_that_enter_are_decided_again():
    joined = strayed = 0
    for seed in range(60):
        run = schema.resolve({"gradient_accumulation_steps": 2}, groups=3 + seed % 3)
        world = World(machine.Job(run.groups, 2, 3, 6, placement=schema.placement_of(run)), seed)
        world.run(kills=2, joins=3)
        begin = {"event": "begin", "steps": 6, "buckets": 3, "microbatches": run.microbatches}
        views = [{"event": "view", **world.views[epoch].to_json()} for epoch in sorted(world.views)]
        result = replay(Record.of(run, [Line(n, fields) for n, fields in enumerate([begin, *views], start=1)]))
        assert not [decision for decision in result.different if decision.kind == "view"]
        assert result.count("view") == len(views)
        joined += sum(len(view["joined"]) for view in views)
        strayed += world.entries["strayed"]
    assert joined > 40 and strayed


def silence(within: str) -> Record:
    """Three groups, of which the last gave no sign in the middle of step 1."""
    run = schema.resolve({}, groups=3)
    lost = {2: f"no report within {within} s of the end of epoch 0"}
    begun = PlanOrigin((0, 1, 2)).after(lost, ())
    reports = tuple(Report(0, group, 1, (0,)) for group in (0, 1))
    noticed = "group 0 reports: an operation timed out"
    view = View(
        1, (0, 1), lost[2], step=1, lost=lost, final={0: 0}, plan_origin=begun, reports=reports, noticed=noticed
    )
    step = {"event": "step", "step": 0, "epoch": 0, "live": [0, 1, 2], "microbatches": 3}
    begin = {"event": "begin", "steps": 6, "buckets": 3, "microbatches": 3}
    views = [{"event": "view", **v.to_json()} for v in (first_view(3), view)]
    return Record.of(run, [Line(n, fields) for n, fields in enumerate([begin, views[0], step, views[1]], start=1)])


def test_a_silent_group_is_given_up_after_the_configured_time():
    result = replay(silence("60"))
    assert not result.different and result.count("view") == 2
    (decision,) = replay(silence("30")).different
    assert (decision.line, [d.name for d in decision.differences]) == (4, ["reason", "lost"])


# --- changes are seen -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> RecordedWorld:
    """A run of four groups: view 1 hands over the state of step 0, view 2 the third bucket of step 3."""
    run = schema.resolve({"gradient_accumulation_steps": 4}, groups=4)
    world = RecordedWorld(tmp_path_factory.mktemp("told") / "run", run, buckets=7, steps=8, seed=0)
    world.kill(0)
    world.play(until=lambda: world.alive[3].state.step == 3 and len(world.alive[3].state.reduced_buckets) == 3)
    world.kill(2)
    world.play()
    world.end()
    return world


def test_the_told_run_is_decided_again(told):
    record = same(told.directory)
    assert record.ended and record.views[1].view.source == 1
    assert record.views[2].view.final == {0: 1, 1: 1, 2: 3} and record.views[2].view.missing == {2: (1,)}


def find(lines: list[dict], event: str, **fields) -> int:
    """Return the index of the line of an event with these fields."""
    wanted = {"event": event, **fields}.items()
    (found,) = [i for i, line in enumerate(lines) if wanted <= {k: line.get(k) for k, _ in wanted}.items()]
    return found


def write(directory: Path, lines: list[dict]) -> None:
    (directory / history.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def copied(told, tmp_path) -> Path:
    """A copy of the told run, to be tampered with."""
    return shutil.copytree(told.directory, tmp_path / "run")


VIEW_1, VIEW_2 = ("view", {"epoch": 1}), ("view", {"epoch": 2})
RECOVERY, STEP = ("recovery", {"epoch": 2}), ("step", {"step": 4})
TAMPERED = {
    "first view": (("view", {"epoch": 0}), {"live": [0, 1, 2]}, {"live"}),
    "live": (VIEW_2, {"live": [1, 2, 3]}, {"live"}),
    "final": (VIEW_2, {"final": {"0": 3, "1": 1, "2": 3}}, {"final"}),
    "missing": (VIEW_2, {"missing": {}}, {"missing"}),
    "begun": (VIEW_2, {"begun": [[1, 2, 3], []]}, {"begun"}),
    "step of a view": (VIEW_2, {"step": 4}, {"step"}),
    "source": (VIEW_1, {"source": 2}, {"source"}),
    "behind": (VIEW_1, {"behind": [3]}, {"behind"}),
    "incarnations": (VIEW_1, {"incarnations": {"1": 1}}, {"incarnations"}),
    "a lost group nobody heard of": (VIEW_2, {"lost": {}}, {"who proposes it"}),
    "have of a report": (
        VIEW_2,
        {"reports": [[3, [0], True, False, [1]], [3, [0, 1, 2], True, False, [3]]]},
        {"final", "missing"},
    ),
    "a bucket there is not": (VIEW_2, {"reports": [[3, [0, 9], True, False, [1, 3]]]}, {"where group 1 stood"}),
    "a step there is not": (VIEW_2, {"reports": [[99, [], True, False, [1, 3]]]}, {"where group 1 stood"}),
    "complete": (VIEW_2, {"reports": [[3, [0, 1, 2], True, True, [1, 3]]]}, {"the report of group 1"}),
    "groups two steps apart": (
        VIEW_2,
        {"reports": [[3, [0, 1, 2], True, False, [1]], [1, [], True, False, [3]]]},
        {"what core says of it"},
    ),
    "patched": (RECOVERY, {"patched": 99}, {"patched"}),
    "patched_by": (RECOVERY, {"patched_by": {"1": 99}}, {"patched_by"}),
    "unhosted": (RECOVERY, {"unhosted": 99}, {"unhosted"}),
    "buckets_kept": (RECOVERY, {"buckets_kept": 4}, {"buckets_kept"}),
    "buckets_redone": (RECOVERY, {"buckets_redone": 3}, {"buckets_redone"}),
    "state_from": (("recovery", {"epoch": 1}), {"state_from": 2}, {"state_from"}),
    "step of a recovery": (RECOVERY, {"step": 4}, {"step"}),
    "live of a step": (STEP, {"live": [1]}, {"live"}),
    "epoch of a step": (STEP, {"epoch": 1, "live": [1, 2, 3]}, {"epoch", "live"}),
    "microbatches of a step": (STEP, {"microbatches": 12}, {"microbatches"}),
}


@pytest.mark.parametrize(("where", "changes", "names"), TAMPERED.values(), ids=TAMPERED.keys())
def test_a_changed_decision_is_seen(copied, told, capsys, where, changes, names):
    lines = told.lines
    index = find(lines, where[0], **where[1])
    lines[index].update(changes)
    write(copied, lines)
    (decision,) = replay(Record.load(copied)).different
    assert decision.line == index + 1
    assert {difference.name for difference in decision.differences} == names
    assert main([str(copied)]) == 1
    assert f"DIFFERENT (history.jsonl line {index + 1})" in capsys.readouterr().out


def test_both_values_are_shown(copied, told, capsys):
    lines = told.lines
    line = lines[find(lines, "recovery", epoch=2)]
    decided, line["patched"] = line["patched"], 99
    write(copied, lines)
    assert main([str(copied)]) == 1
    assert f"patched: recorded 99, core decides {decided}" in capsys.readouterr().out
    assert main([str(copied), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    (different,) = [decision for decision in shown["decisions"] if decision["differences"]]
    assert different["differences"] == [{"name": "patched", "recorded": 99, "decided": decided}]
    assert shown["same"] is False and shown["ended"] is True


LINES = {
    "a recovery left out": (
        lambda lines: lines.pop(find(lines, "recovery", epoch=2)),
        "recovery in epoch 2: none recorded",
    ),
    "a step left out": (lambda lines: lines.pop(find(lines, "step", step=5)), "step 5: none recorded"),
    "a second recovery": (lambda lines: lines.append(lines[find(lines, "recovery", epoch=2)]), "recovery in epoch 2: "),
    "a recovery of no epoch": (
        lambda lines: lines.append({**lines[find(lines, "recovery", epoch=2)], "epoch": 7}),
        "recovery in epoch 7: ",
    ),
    "a second step": (lambda lines: lines.append(lines[find(lines, "step", step=5)]), "step 5"),
    "a step after the last": (lambda lines: lines.append({**lines[find(lines, "step", step=7)], "step": 8}), "step 8"),
}


@pytest.mark.parametrize(("change", "what"), LINES.values(), ids=LINES.keys())
def test_missing_and_extra_lines_are_seen(copied, change, what):
    rewritten(change)(copied)
    (decision,) = replay(Record.load(copied)).different
    assert decision.what.startswith(what)


def test_a_run_that_went_on_although_it_had_to_stop_is_seen(copied):
    section(min_groups=4)(copied)
    result = replay(Record.load(copied))
    assert [decision.what for decision in result.different if decision.kind == "view"] == ["view 2: live 1 3, lost 2"]
    assert result.stopped == "view 2 differs"


def test_another_placement_is_seen(copied):
    """Plans depend on which groups host which shards: with another placement other groups take over."""
    section(placement="full", redundancy=4)(copied)
    different = replay(Record.load(copied)).different
    assert {decision.kind for decision in different} == {"recovery"}
    assert "patched_by" in {difference.name for decision in different for difference in decision.differences}


# --- records that cannot be replayed, and differences that do not matter ----------------------------------------------


def test_unknown_lines_and_fields_and_torn_lines_do_not_matter(copied, told, capsys):
    write(copied, [{"event": "news", "step": "?"}, {"event": 7}, *({**line, "unknown": [1]} for line in told.lines)])
    with (copied / history.FILE).open("a") as file:
        file.write('{"t": 1.0, "event": "ste\n')
    assert main([str(copied)]) == 0
    shown = capsys.readouterr().out
    assert "view 2: live 1 3, lost 2: same\n" in shown
    assert "3 view lines, 2 recovery lines, 8 step lines: all the same" in shown
    assert "1 torn lines were skipped" in shown and "cut off" not in shown


def test_a_run_that_was_cut_off_is_reported_as_such(copied, told, capsys):
    write(copied, told.lines[:-1])
    assert main([str(copied)]) == 0
    assert "cut off" in capsys.readouterr().out


def settings(**changes):
    """Damage a copied run: these settings instead."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def section(**changes):
    """Damage a copied run: these settings of fault tolerance instead."""

    def change(directory: Path) -> None:
        raw = json.loads((directory / "config.json").read_text())["fault_tolerance"]
        settings(fault_tolerance={**raw, **changes})(directory)

    return change


def rewritten(change):
    """Damage a copied run: its lines after ``change`` has been made to their list."""

    def rewrite(directory: Path) -> None:
        lines = history.read(directory)
        change(lines)
        write(directory, lines)

    return rewrite


def text(name: str, content: bytes):
    return lambda directory: (directory / name).write_bytes(content)


def field(event: str, where: dict, **changes):
    return rewritten(lambda lines: lines[find(lines, event, **where)].update(changes))


def without(event: str, where: dict, name: str):
    return rewritten(lambda lines: lines[find(lines, event, **where)].pop(name))


MISUSE = {
    "no directory": (shutil.rmtree, "is not a directory"),
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json does not exist"),
    "no history": (lambda directory: (directory / history.FILE).unlink(), "history.jsonl does not exist"),
    "an empty history": (text(history.FILE, b""), "no 'begin' line"),
    "a history of something else": (text(history.FILE, bytes(range(256)) * 9), "no 'begin' line"),
    "a history that nests too deep": (text(history.FILE, b"[" * 200_000 + b"\n"), "nests deeper"),
    "a config that is no JSON": (text("config.json", b"{"), "not a config of this version"),
    "a config that is a list": (text("config.json", b"[]"), "not a config of this version"),
    "a config that nests too deep": (text("config.json", b"[" * 200_000), "nests deeper"),
    "a config of an old version": (settings(fault_tolerance={"detector": {}}), "lacks 'failure_domains'"),
    "a setting out of range": (settings(groups="4"), "RunConfig.groups: '4' is no int"),
    "a config of another run": (settings(microbatches_per_group=2), "16 microbatches in every step, config.json 8"),
    "no begin": (rewritten(lambda lines: lines.pop(find(lines, "begin"))), "no 'begin' line"),
    "no buckets": (without("begin", {}, "buckets"), "lacks 'buckets'"),
    "buckets in words": (field("begin", {}, buckets="seven"), "says buckets 'seven'"),
    "no views": (rewritten(lambda lines: lines.__setitem__(slice(1, None), [])), "no 'view' line"),
    "a view too few": (rewritten(lambda lines: lines.pop(find(lines, "view", epoch=1))), "view 1 is missing"),
    "two views of one epoch": (
        rewritten(lambda lines: lines.append({**lines[find(lines, "view", epoch=1)], "step": 1})),
        "another view of epoch 1",
    ),
    "a view of an old version": (without("view", {"epoch": 1}, "reports"), "lacks 'reports'"),
    "a view with a group in words": (field("view", {"epoch": 1}, live=["one"]), "View.live: 'one' is no int"),
    "a view with a reason in numbers": (field("view", {"epoch": 1}, reason=1), "View.reason: 1 is no str"),
    "a report of a group in words": (field("view", {"epoch": 1}, reports=[[1, [], True, False, ["0"]]]), "wrong kind"),
    "a view with numbers for reports": (field("view", {"epoch": 1}, reports=[1]), "not a view of this version"),
    "a step without groups": (without("step", {"step": 4}, "live"), "lacks 'live'"),
    "a recovery without a step": (field("recovery", {"epoch": 1}, step=None), "says step None"),
}


@pytest.mark.parametrize(("damage", "message"), MISUSE.values(), ids=MISUSE.keys())
def test_a_record_that_cannot_be_replayed_is_reported_in_a_sentence(copied, capsys, damage, message):
    damage(copied)
    assert main([str(copied)]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out
    assert main([str(copied), "--json"]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("command", [["tools/replay.py"], ["-m", "tools.replay"]])
def test_replay_is_a_command(told, command):
    arguments = [sys.executable, *command, str(told.directory)]
    done = subprocess.run(arguments, cwd=support.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "all the same" in done.stdout, done.stderr
