"""``megatron-ft simulate``: its output, which does not depend on the number of processes, and one line for a mistake."""

import json

import pytest

from megatron_ft import cli

SMALL = """--gpus 24 --gpus-per-group 2 --system-mtbf-s 400 --step-s 10 --allreduce-s 1 --restart-s 100 --checkpoint-s 5
 --microbatches 4 --steps 300 --rejoin-s 60""".split()


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["simulate", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_line_for_every_policy_fastest_first(capsys):
    code, shown, _ = run(capsys, *SMALL, "--jobs", 1, "--trials", 2)
    assert code == 0
    rows = [line.split()[0] for line in shown.splitlines() if line[:2].strip() and "." in line and "%" in line]
    assert sorted(rows) == sorted(["restart", "replication", "spare", "recover", "stacked_quota", "stacked_quota"])
    assert rows[0] == "stacked_quota" and "+ rejoin" in shown


def test_a_policy_that_never_finishes_is_shown_as_given_up(capsys):
    """Trials that are given up have no mean and no spread."""
    hopeless = [*SMALL, "--system-mtbf-s", 20, "--policy", "restart", "--jobs", 1, "--trials", 2]
    code, shown, _ = run(capsys, *hopeless)
    assert code == 0 and "stopped at" in shown


def test_the_same_seed_gives_the_same_bytes_whatever_the_processes(capsys):
    common = (*SMALL, "--policy", "spare,stacked_quota", "--json", "--seed", 3)
    first, second = run(capsys, *common, "--jobs", 1), run(capsys, *common, "--jobs", 2)
    assert first[:2] == second[:2] and first[0] == 0
    found = json.loads(first[1])["policies"]["spare"]
    assert [trial["seed"] for trial in found["trials"]] == [3, 4, 5]
    assert len({trial["time_s"] for trial in found["trials"]}) == 3
    assert sum(found["parts_s"].values()) == pytest.approx(sum(t["time_s"] for t in found["trials"]) / 3)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--policy", "magic"], "--policy 'magic' is not known; there are: restart, replication"),
        (["--redundancy", "13"], "13"),
        (["--redundancy", "9", "--policy", "spare"], "take at most"),
        (["--trials", "0"], "--trials is 0; it must be a whole number >= 1"),
        (["--seed", "-1"], "--seed is -1; it must be a whole number >= 0"),
        (["--shape", "x"], "shape is 'x'; it must be a number > 0"),
        (["--shape", "0"], "shape is 0; it must be a number > 0"),
        (["--renewal", "daily"], "renewal is 'daily'; it must be one of: system, groups, replaced"),
        (["--step-s", "-1"], "step_s is -1; it must be a number > 0"),
        (["--system-mtbf-s", "1"], "more often than one step"),
        (["--rejoin-s", "none", "--policy", "stacked_quota_rejoin"], "needs --rejoin-s"),
    ],
)
def test_a_mistake_is_told_in_one_line(capsys, arguments, words):
    code, out, err = run(capsys, *SMALL, *arguments)
    assert code == 2 and not out
    assert words in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err
