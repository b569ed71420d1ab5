"""Schedules: reading and writing, one line for an invalid schedule, and mixes drawn from a seed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.cluster.faults import host_faults, mix, schedule
from megatron_ft.cluster.faults.schedule import Fault, Schedule, load
from megatron_ft.errors import ConfigError
from megatron_ft.plan.failures import MIX
from megatron_ft.run.injection_points import CORRUPTIBLE_BY, POINTS, STATE

TIMES = st.floats(0, 1e6) | st.integers(0, 10**6)
POSITIVE = st.floats(0.001, 1e4)
VALUES = {
    "group": st.integers(0, 99),
    "groups": st.lists(st.integers(0, 99), min_size=1, unique=True).map(tuple),
    "position": st.integers(0, 7),
    "point": st.sampled_from(POINTS),
    "duration_s": POSITIVE,
    "factor": st.floats(1.01, 100),
    "steps": st.integers(1, 100),
    "what": st.just("gradient"),
    "bit": st.integers(0, 63),
    "netns": st.text(min_size=1),
    "peer": st.just("10.0.0.2"),
    "direction": st.sampled_from(["both", "in", "out"]),
    "share": st.floats(0.01, 1),
    "directory": st.text(min_size=1),
    "limit_mb": POSITIVE,
}


@st.composite
def faults(draw) -> Fault:
    kind = draw(st.sampled_from(schedule.KINDS))
    allowed, needed = schedule._ALLOWED[kind], schedule._NEEDED.get(kind, ("group",))
    chosen = {name for name in sorted(allowed & VALUES.keys()) if name in needed or draw(st.booleans())}
    if "how" in allowed:
        chosen.discard("duration_s")
    values = {name: draw(VALUES[name]) for name in chosen}
    if values.get("point") in ("reduce", "bucket") or kind in ("nan", "bitflip"):
        values["bucket"] = draw(st.none() | st.integers(0, 50))
    if kind in CORRUPTIBLE_BY and draw(st.booleans()):
        values["what"] = draw(st.sampled_from(CORRUPTIBLE_BY[kind]))
        values["bucket"] = None if values["what"] in (*STATE, "activation") else values.get("bucket")
    if "how" in allowed and draw(st.booleans()):
        values |= {"how": "stop", "duration_s": draw(POSITIVE)}
    when = draw(st.sampled_from(["after_s", "wait_s", "step"]))
    return Fault(kind=kind, **values, **{when: draw(st.integers(0, 10**6) if when == "step" else TIMES)})


@given(st.lists(faults(), max_size=5), st.integers())
def test_a_written_schedule_is_read_unchanged(found, seed):
    mine = Schedule(tuple(found), seed)
    assert Schedule.from_json(json.loads(json.dumps(mine.to_json()))) == mine


@given(faults())
def test_every_fault_has_a_description(fault):
    assert fault.when() and fault.whom()
    assert fault.takes(100) <= set(range(100))


def test_yaml_and_json_are_equivalent(tmp_path):
    pytest.importorskip("yaml")
    json_file, yaml_file = tmp_path / "a.json", tmp_path / "a.yaml"
    mine = mix.draw(5, 1, 4)
    json_file.write_text(json.dumps(mine.to_json()))
    lines = [f"- {json.dumps(fault)}" for fault in mine.to_json()["faults"]]
    yaml_file.write_text("\n".join([f"seed: {mine.seed}", "faults:", *lines]))
    assert load(json_file) == load(yaml_file) == mine


KILL = '"kind": "kill", "group": 1'  # in place of the word in the texts below
BAD = {
    "not JSON": ("{", "it is not JSON"),
    "no faults": ("{}", "a schedule is an object with a list of faults"),
    "an unknown word beside": ('{"faults": [], "sead": 1}', "'sead' is not known; a schedule has faults and seed"),
    "a seed of text": ('{"faults": [], "seed": "1"}', "seed is '1'"),
    "not an object": ('{"faults": [3]}', "fault 1: 3 is not a fault"),
    "no kind": ('{"faults": [{"group": 1}]}', "fault 1: kind is missing; choose from kill, stop"),
    "an unknown kind": (
        '{"faults": [{"kind": "boom", "step": 1}]}',
        "kind is 'boom', which is unknown; choose from kill, stop",
    ),
    "an unknown field": ('{"faults": [{KILL, "stepp": 1}]}', "'stepp' is not known"),
    "a field of another kind": ('{"faults": [{KILL, "step": 1, "factor": 2}]}', "kill has no field factor"),
    "a key twice": ('{"faults": [{KILL, "group": 2, "step": 1}]}', "'group' is given twice"),
    "no time": ('{"faults": [{KILL}]}', "kill has no time and must have one of"),
    "two times": ('{"faults": [{KILL, "step": 1, "after_s": 1}]}', "kill has after_s and step"),
    "a negative time": ('{"faults": [{KILL, "after_s": -1}]}', "after_s is -1; it must be a number >= 0"),
    "a time that never comes": ('{"faults": [{KILL, "after_s": Infinity}]}', "after_s is inf"),
    "an unknown point": (
        '{"faults": [{KILL, "step": 1, "point": "x"}]}',
        "point is 'x'; it must be one of: begin",
    ),
    "a bucket where there is none": ('{"faults": [{KILL, "step": 1, "point": "gate", "bucket": 0}]}', "have buckets"),
    "half a step": ('{"faults": [{KILL, "step": 1.5}]}', "step is 1.5; it must be a whole number >= 0"),
    "true as a group": ('{"faults": [{"kind": "kill", "group": true, "step": 1}]}', "group is True"),
    "nobody": ('{"faults": [{"kind": "kill", "step": 1}]}', "kill needs group"),
    "a rack of nobody": ('{"faults": [{"kind": "rack", "groups": [], "step": 1}]}', "groups is ()"),
    "a rack twice": ('{"faults": [{"kind": "rack", "groups": [1, 1], "step": 1}]}', "different group numbers"),
    "faster": (
        '{"faults": [{"kind": "slow", "group": 1, "factor": 0.5, "step": 1}]}',
        "factor is 0.5; it must be a number > 1",
    ),
    "a kill that ends": (
        '{"faults": [{"kind": "agent", "duration_s": 1, "step": 1}]}',
        'agent kills by default; add "how": "stop"',
    ),
    "more than all": (
        '{"faults": [{"kind": "cut", "group": 1, "netns": "a", "peer": "b", "share": 2, "step": 1}]}',
        "share is 2",
    ),
    "a bit too far": ('{"faults": [{"kind": "bitflip", "group": 1, "bit": 64, "step": 1}]}', "bit is 64"),
    "a loss has no bits": (
        '{"faults": [{"kind": "bitflip", "group": 1, "what": "loss", "step": 1}]}',
        "what is 'loss'",
    ),
    "a parameter is in no bucket": (
        '{"faults": [{"kind": "bitflip", "group": 1, "what": "parameter", "bucket": 1, "step": 1}]}',
        "bucket is 1",
    ),
    "in all ranks": (
        '{"faults": [{"kind": "nan", "group": 1, "position": "all", "step": 1}]}',
        "nan happens in one rank",
    ),
}


@pytest.mark.parametrize("text, said", BAD.values(), ids=BAD.keys())
def test_a_bad_schedule_gets_one_line_that_names_it(tmp_path, text, said):
    path = tmp_path / "bad.json"
    path.write_text(text.replace("KILL", KILL))
    with pytest.raises(ConfigError) as error:
        load(path)
    assert said in str(error.value)
    assert str(error.value).startswith(f"schedule {path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["faults: [", "a: 1\na: 2", "? {a: 1}\n: 2", "faults: [{kind: kill, kind: stop}]", "3"]
)
def test_bad_yaml_gets_one_line(tmp_path, text):
    pytest.importorskip("yaml")
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_gets_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8'"):
        load(tmp_path / "x.json")


def test_a_fault_for_a_missing_group_or_rank_is_refused():
    with pytest.raises(ConfigError, match="fault 2 is for group 4; the run has groups 0 to 3"):
        Schedule((Fault(kind="kill", group=3, step=0), Fault(kind="rack", groups=(3, 4), step=0))).check(4, 1)
    with pytest.raises(ConfigError, match="fault 1 is for rank 2; groups have ranks 0 to 1"):
        Schedule((Fault(kind="kill", group=3, position=2, step=0),)).check(4, 2)


def test_targets_and_lost_groups_of_a_fault():
    assert Fault(kind="kill", group=2, position="all", step=0).targets(3) == ((2, 0), (2, 1), (2, 2))
    assert Fault(kind="rack", groups=(0, 2), step=0).targets(2) == ((0, 0), (0, 1), (2, 0), (2, 1))
    assert Fault(kind="rack", groups=(0, 2), step=0).takes(4) == {0, 2}
    assert Fault(kind="agent", step=0).takes(4) == {0, 1, 2, 3}
    assert Fault(kind="store", how="stop", step=0).takes(4) == set()
    assert Fault(kind="nan", group=1, step=0).takes(4) == set()


def test_keys_of_faults_depend_on_the_schedule():
    mine = mix.draw(3, 0, 4)
    assert len({mine.key(i) for i in range(3)} | {mix.draw(3, 1, 4).key(i) for i in range(3)}) == 6
    assert mine.key(1) == mix.draw(3, 0, 4).key(1)


# --- the mix ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(), st.integers(1, 50))
def test_the_same_seed_draws_the_same_possible_schedule(count, seed, groups):
    drawn = mix.draw(count, seed, groups)
    assert drawn == mix.draw(count, seed, groups)
    drawn.check(groups, 1)
    times = [fault.after_s for fault in drawn.faults]
    assert len(times) == count and times == sorted(times)


@given(st.integers(1, 40), st.integers(0, 99), st.sets(st.integers(0, 40), min_size=1), st.floats(0, 1e6))
def test_a_mix_for_a_live_run_has_living_groups_and_later_times(count, seed, living, age):
    drawn = mix.draw(count, seed, living, since_s=age)
    assert {group for fault in drawn.faults for group, _ in fault.targets(1)} <= living
    assert all(fault.after_s >= round(age, 3) for fault in drawn.faults)
    assert mix.draw(count, seed, range(8)) == mix.draw(count, seed, 8)


def test_injector_and_simulator_draw_from_the_same_mix():
    assert mix.MIX == MIX


def test_a_large_mix_has_the_shares_it_is_drawn_from():
    count, groups, every_s = 20000, 100, 10.0
    drawn = mix.draw(count, 0, groups, every_s).faults
    kinds = Counter(fault.kind for fault in drawn)
    expected = {
        "rack": 0.7 * 0.05,
        "kill": 0.95 * (0.55 * 0.6 + 0.15),
        "exception": 0.95 * 0.55 * 0.3,
        "oom": 0.95 * 0.55 * 0.1,
        "stop": 0.12 * 0.8 + 0.10,
        "gil": 0.12 * 0.2,
        "slow": 0.03,
        "terminate": 0.03,
        "bitflip": 0.02 * 0.99,
        "nan": 0.02 * 0.01,
    }
    assert set(kinds) <= set(expected) and sum(expected.values()) == pytest.approx(1)
    for kind, share in expected.items():
        assert kinds[kind] / count == pytest.approx(share, abs=0.01), kind
    assert drawn[-1].after_s / count == pytest.approx(every_s, rel=0.05)
    hit = Counter(fault.group for fault in drawn if fault.group is not None)
    frail = sum(number for _, number in hit.most_common(3)) / sum(hit.values())
    assert frail == pytest.approx(0.5 + 0.5 * 0.03, abs=0.02)


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_cut_names_its_own_table_and_only_its_link():
    fault = Fault(kind="cut", group=0, netns="host1", peer="10.0.0.2", direction="in", share=0.3, step=0)
    table, chain, rule = (" ".join(command) for command in host_faults.cut_commands(fault, "ab/1", nft=True))
    assert table == "ip netns exec host1 nft add table inet megatron_ft_ab_1"
    assert "hook input priority" in chain
    assert rule.endswith("megatron_ft_ab_1 input ip saddr 10.0.0.2 numgen random mod 1000 < 300 drop")
    assert host_faults.heal_commands(fault, "ab/1", nft=True)[0][-1] == "megatron_ft_ab_1"


def test_iptables_removes_exactly_the_rules_that_it_added():
    fault = Fault(kind="cut", group=0, netns="host1", peer="10.0.0.2", step=0)
    cut = host_faults.cut_commands(fault, "ab/1", nft=False)
    heal = host_faults.heal_commands(fault, "ab/1", nft=False)
    assert len(cut) == 2
    assert [["-D" if word == "-I" else word for word in command] for command in cut] == heal


def test_missing_requirements_of_a_cut_are_reported(monkeypatch):
    fault = Fault(kind="cut", group=0, netns="no-such-host", peer="10.0.0.2", step=0)
    monkeypatch.setattr(host_faults.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="cut needs root"):
        host_faults.check(fault)
    monkeypatch.setattr(host_faults.os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="cut needs ip and nft"):
        host_faults.check(fault, which=lambda name: None)
    with pytest.raises(ConfigError, match="namespace 'no-such-host' does not exist"):
        host_faults.check(fault, which=lambda name: name)
    with pytest.raises(ConfigError, match="and must be the IP address"):
        host_faults.check(Fault(kind="cut", group=0, netns="a", peer="eth0", step=0))


def test_a_large_disk_is_not_filled(tmp_path):
    with pytest.raises(ConfigError, match="MiB free, more than limit_mb 0.001"):
        host_faults.check(Fault(kind="disk_full", directory=str(tmp_path), duration_s=1, limit_mb=0.001, step=0))
    with pytest.raises(ConfigError, match="does not exist"):
        host_faults.check(Fault(kind="disk_full", directory=str(tmp_path / "x"), duration_s=1, step=0))
