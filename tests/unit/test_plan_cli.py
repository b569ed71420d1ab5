"""The output of ``megatron-ft plan``, and one clear line for every mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_ft import cli
from megatron_ft.config import schema

GOLDEN = Path(__file__).parent / "data" / "plan-spare-600k.json"
SIZES = ["--gpus", "64", "--gpus-per-group", "8", "--step-s", "2", "--steps", "10000"]
JOB = [*SIZES, "--restart-s", "300", "--checkpoint-s", "30"]
RATE = ["--failures-per-1000-node-days", "4"]


def plan(capsys, *arguments: object) -> str:
    assert cli.main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def as_json(capsys, *arguments: object) -> dict:
    return json.loads(plan(capsys, *arguments, "--json"))


def same(found, expected) -> bool:
    """Compare; numbers may differ by as much as another version of scipy may change."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == (pytest.approx(expected, rel=1e-4) if isinstance(expected, float) else expected)


def test_json_of_a_preset_is_stable(capsys):
    """After an intended change: megatron-ft plan --preset spare-600k --json > tests/unit/data/plan-...json"""
    found, expected = as_json(capsys, "--preset", "spare-600k"), json.loads(GOLDEN.read_text())
    assert found.keys() == expected.keys()
    different = [key for key in expected if not same(found[key], expected[key])]
    assert not different, [found[key] for key in different]


def test_the_table_names_the_policies_and_their_numbers(capsys):
    printed = plan(capsys, "--preset", "spare-600k")
    for word in (
        "restart",
        "replication",
        "spare",
        "recover",
        "stacked_quota",
        "+ rejoin",
        "mu",
        "S_bar",
        "T_c*",
        "r* =",
    ):
        assert word in printed
    assert "…" not in printed, "80 columns are enough"
    assert "Recommended: stacked_quota with rejoin" in printed


def test_the_section_can_be_pasted_from_the_output_and_from_a_file(capsys, tmp_path):
    printed = plan(capsys, "--preset", "lab-64", "--out", tmp_path / "section.json")
    written = json.loads((tmp_path / "section.json").read_text())
    begin, end = printed.index("{"), printed.rindex("}") + 1
    assert json.loads(printed[begin:end]) == written
    assert schema.resolve(written, groups=8).fault_tolerance.policy == "stacked_quota"
    assert "# checkpoint.period_s: every 3.27 h: " in printed[end:] and "the run's 11.6 days (500,000 steps)" in printed
    assert "# spare nodes: if a repair takes 24 h" in printed
    given = plan(capsys, "--preset", "lab-64", "--repair-hours", 100, "--job-mtbf-hours", 50)
    assert "with 4.17 days to repair a node" in given and "every 2.08 days" in given


def test_flags_replace_the_file_and_the_file_the_preset(capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"restart_s": 111, "checkpoint_s": 22, "node_mtbf_hours": 5000}')
    found = as_json(capsys, "--preset", "lab-64", "--file", path, "--restart-s", "7")
    assert (found["cluster"]["restart_s"], found["cluster"]["checkpoint_s"]) == (7, 22)
    assert found["cluster"]["mtbf_s"] == pytest.approx(5000 * 3600 / 8), "the file's rate, not the preset's"


def test_the_three_ways_to_give_a_failure_rate(capsys):
    ways = (RATE, ["--node-mtbf-hours", "6000"], ["--system-mtbf-s", "2.7e6"])  # 8 nodes
    assert len({as_json(capsys, *JOB, *way)["cluster"]["mtbf_s"] for way in ways}) == 1


def test_yaml(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "gpus: 64\ngpus_per_group: 8\nstep_s: 2\nrestart_s: 300\ncheckpoint_s: 30\nsteps: 1000\nsystem_mtbf_s: 1.0e+5\n"
    )
    assert as_json(capsys, "--file", path)["cluster"]["mtbf_s"] == 1e5


def test_rejoin_can_be_ruled_out(capsys):
    found = as_json(capsys, *JOB, *RATE, "--rejoin-s", "none")
    assert "stacked_quota_rejoin" not in [estimate["policy"] for estimate in found["policies"]]


def refused(capsys, *arguments: object) -> str:
    """Check for exit code 2 and one line on stderr; return the line."""
    assert cli.main(["plan", *map(str, arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("megatron-ft plan: ") and streams.err.count("\n") == 1
    return streams.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            [],
            [
                "missing: --gpus, --gpus-per-group, --step-s, --restart-s, --checkpoint-s, --steps, the",
                "--preset (llama3-16k",
            ],
        ),
        (JOB, ["missing: the failure rate (--node-mtbf-hours, ", " or --system-mtbf-s); give"]),
        (SIZES + RATE, ["missing: --restart-s, --checkpoint-s; give"]),
        ([*JOB, *RATE, "--job-mtbf-hours", "0"], ["job_mtbf_hours is 0", "> 0"]),
        (["--preset", "lama"], ["'lama'", "llama3-16k"]),
        ([*JOB, *RATE, "--step-s", "-1"], ["step_s is -1", "> 0"]),
        ([*JOB, *RATE, "--step-s", "nan"], ["step_s is nan", "> 0"]),
        ([*JOB, *RATE, "--step-s", "fast"], ["step_s is 'fast'", "a number"]),
        ([*JOB, *RATE, "--restart-s", "-5"], ["restart_s is -5", ">= 0"]),
        ([*JOB, *RATE, "--detection-s", "-0.1"], ["detection_s is -0.1"]),
        ([*JOB, *RATE, "--checkpoint-s", "0"], ["checkpoint_s is 0", "> 0"]),
        ([*JOB, *RATE, "--allreduce-s", "2"], ["allreduce_s is 2", "step_s is 2"]),
        ([*JOB, *RATE, "--gpus", "0"], ["gpus is 0", "whole number >= 1"]),
        ([*JOB, *RATE, "--gpus", "6.5"], ["gpus is 6.5", "whole number"]),
        ([*JOB, *RATE, "--gpus", "60"], ["gpus is 60", "must divide", "56"]),
        ([*JOB, *RATE, "--gpus", "8000000000"], ["1000000000 groups", "at most 100000"]),
        ([*JOB, *RATE, "--redundancy", "9"], ["redundancy is 9", "8 groups"]),
        ([*JOB, *RATE, "--redundancy", "0"], ["redundancy is 0"]),
        ([*JOB, *RATE, "--redundancy", "two"], ["redundancy is 'two'", "whole number"]),
        ([*JOB, "--system-mtbf-s", "1"], ["fails every 1 s", "one step of 2 s"]),
        ([*JOB, "--system-mtbf-s", "0"], ["system_mtbf_s is 0", "> 0"]),
        ([*JOB, "--system-mtbf-s", "inf"], ["system_mtbf_s is inf"]),
        ([*JOB, *RATE, "--node-mtbf-hours", "9"], ["node_mtbf_hours and failures_per_1000_node_days", "one of them"]),
        ([*JOB, *RATE, "--file", "/nowhere/plan.json"], ["/nowhere/plan.json does not exist"]),
        ([*JOB, *RATE, "--out", "/nowhere/s.json"], ["/nowhere/s.json"]),
    ],
)
def test_a_mistake_is_one_clear_line(capsys, arguments, words):
    line = refused(capsys, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("plan.json", b'{"gpus": 64', ["is not JSON", "line 1"]),
        ("plan.json", b"[1, 2]", ["holds a list"]),
        ("plan.json", b'{"gpu": 64}', ["'gpu' is not known", "'gpus'"]),
        ("plan.json", b'{"gpus": "64"}', ["gpus is '64'", "whole number"]),
        ("plan.json", b'{"gpus": true}', ["gpus is True"]),
        ("plan.json", b'{"gpus": null}', ["gpus has no value"]),
        ("plan.json", b'{"gpus": 64, "gpus": 32}', ["'gpus' is given twice"]),
        ("plan.json", b'{"node_mtbf_hours": 1, "system_mtbf_s": 1}', ["both given"]),
        ("plan.json", b'{"failures_per_1000_node_days": "many"}', ["failures_per_1000_node_days is 'many'"]),
        ("plan.json", b"\xff\xfe\x00", ["cannot be read"]),
        ("plan.yaml", b"gpus: [64", ["is not YAML", "line"]),
        ("plan.yaml", b"just words", ["holds a str"]),
        ("plan.yaml", b"gpus: 64\ngpus: 32\n", ["'gpus' is given twice"]),
        ("plan.yaml", b"a: {b: !!python/name:os.system }\n", ["is not YAML"]),
        ("plan.yaml", b"", ["holds a NoneType"]),
        ("plan.toml", b"gpus = 64", ["it is not JSON", "a YAML file ends in .yaml"]),
    ],
)
def test_a_bad_file_is_one_clear_line(capsys, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    line = refused(capsys, "--preset", "lab-64", "--file", tmp_path / name)
    for word in words:
        assert word in line


def test_a_directory_is_no_file(capsys, tmp_path):
    assert "cannot be read" in refused(capsys, *JOB, *RATE, "--file", tmp_path)


def test_yaml_without_pyyaml_says_what_to_install(capsys, tmp_path, monkeypatch):
    (tmp_path / "plan.yaml").write_text("gpus: 64\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'megatron_ft[yaml]'" in refused(capsys, "--file", tmp_path / "plan.yaml")
