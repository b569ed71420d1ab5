"""Every kept result lists the paths that it depends on, and is reported when these have changed since it was
measured. Every measured number of README and docs is the one of its file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import host_losses
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import claims
import common
import evidence
from evidence import KEPT, RESULTS, Age, Kept, age


@pytest.fixture
def repository(tmp_path):
    """A repository with two files and a result that depends on one of them; returns a function that commits a change."""
    (tmp_path / RESULTS).mkdir(parents=True)

    def commit(path: str, text: str) -> str:
        (tmp_path / path).write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", f"change {path}")
        return git(tmp_path, "rev-parse", "HEAD")

    git(tmp_path, "init", "-q")
    first = commit("used.py", "1")
    result = {"commit": first, "depends_on": ["used.py"]}
    commit(f"{RESULTS}/one.json", json.dumps(result))
    return commit


def git(root, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


ONE = Kept(f"{RESULTS}/one.json", "one.py", ("used.py",))


def test_a_result_is_old_once_its_code_changes(repository, tmp_path):
    repository("other.py", "1")
    assert age("one", ONE, tmp_path).fresh, "what it does not depend on may change"
    repository("used.py", "2")
    found = age("one", ONE, tmp_path)
    assert not found.fresh and [change.partition(" ")[2] for change in found.changes] == ["change used.py"]
    assert str(found).startswith("old  one: 1 commits since")


def test_a_result_does_not_age_by_comments_and_docstrings(repository, tmp_path):
    repository("used.py", "# One.\n1\n")
    assert age("one", ONE, tmp_path).fresh
    repository("used.py", "def f():\n    return 1\n")
    assert not age("one", ONE, tmp_path).fresh


def test_a_result_is_old_once_code_changes_that_it_did_not_know_it_depends_on(repository, tmp_path):
    repository("other.py", "1")
    kept = Kept(ONE.path, ONE.command, ("used.py", "other.py"))
    assert [change.partition(" ")[2] for change in age("one", kept, tmp_path).changes] == ["change other.py"]


def test_a_result_that_was_measured_with_changes_that_were_not_committed_is_old(repository, tmp_path):
    file = tmp_path / ONE.path
    (tmp_path / "new.py").write_text("a file that git does not know changes nothing")
    assert common.dirty(tmp_path) == []
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dirty": []}))
    assert age("one", ONE, tmp_path).fresh and common.dirty(tmp_path) == [], "results may change"
    (tmp_path / "used.py").write_text("2")
    assert common.dirty(tmp_path) == ["used.py"]
    git(tmp_path, "checkout", "used.py")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dirty": ["used.py"]}))
    assert age("one", ONE, tmp_path) == Age("one", dirty=True)
    assert str(age("one", ONE, tmp_path)).endswith("measured with changes that were not committed")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("unblock", "megatron_ft/run/collectives/gloo_sockets.py"),
        ("history", "megatron_ft/record/run_record.py"),
        ("history", "megatron_ft/core/detection/stragglers.py"),
        ("store_growth", "megatron_ft/core/protocol/key_lifetimes.py"),
        ("store_growth", "tests/growth.py"),
        ("fuzz", "megatron_ft/run/collectives/framing.py"),
        ("fuzz", "megatron_ft/cluster/doctor/meeting.py"),
    ],
)
def test_a_result_depends_on_what_it_calls(name, path):
    assert path in KEPT[name].depends_on


def test_changes_that_are_not_committed_count(repository, tmp_path):
    (tmp_path / "used.py").write_text("3")
    assert age("one", ONE, tmp_path) == Age("one", uncommitted=True)


def test_a_result_without_a_commit_counts_from_its_own_last_change(repository, tmp_path):
    kept = Kept("table.csv", "x.py", ("used.py",))
    repository("table.csv", "a,b")
    assert age("table", kept, tmp_path).fresh
    repository("used.py", "2")
    assert len(age("table", kept, tmp_path).changes) == 1


def test_a_result_of_unknown_age_is_reported(repository, tmp_path):
    assert age("two", Kept(f"{RESULTS}/two.json", "two.py", ()), tmp_path).problem == "never measured"
    repository(f"{RESULTS}/one.json", json.dumps({"commit": "0" * 40, "depends_on": ["used.py"]}))
    assert "which this clone does not have" in age("one", ONE, tmp_path).problem


def test_every_result_is_kept_with_the_paths_it_depends_on():
    files = sorted(path.name for path in (ROOT / RESULTS).glob("*.json"))
    assert [name for name in files if name.removesuffix(".json") not in KEPT] == []
    for name in files:
        said = json.loads((ROOT / RESULTS / name).read_text())
        assert said["depends_on"] and said["commit"] and said["command"], name


@pytest.mark.parametrize("name", KEPT)
def test_the_paths_that_a_result_depends_on_exist(name):
    kept = KEPT[name]
    assert kept.depends_on and [path for path in kept.depends_on if not (ROOT / path).exists()] == []


def test_a_new_result_lists_the_paths_it_depends_on():
    assert common.about("goodput", "python benchmarks/goodput.py")["depends_on"] == list(KEPT["goodput"].depends_on)


def test_a_result_of_a_command_without_a_list_of_paths_is_completed(tmp_path):
    file = tmp_path / KEPT["explore"].path
    file.parent.mkdir(parents=True)
    file.write_text('{"seeds": 5, "violations": 0}')
    for _ in range(2):
        evidence.complete("explore", tmp_path)
        said = json.loads(file.read_text())
        assert (said["seeds"], said["depends_on"]) == (5, list(KEPT["explore"].depends_on)) and said["commit"]


def test_a_measurement_that_failed_does_not_replace_the_result(tmp_path, monkeypatch):
    file = tmp_path / "one.json"
    file.write_text("kept")
    (tmp_path / "one.py").write_text("import sys; open('one.json', 'w').write('broken'); sys.exit(1)")
    monkeypatch.setitem(KEPT, "one", Kept("one.json", "one.py", ("one.py",)))
    assert evidence.measure(["one"], tmp_path) == 1
    assert file.read_text() == "kept" and file.with_suffix(".failed").read_text() == "broken"


def test_an_unknown_result_cannot_be_measured():
    script = [sys.executable, str(ROOT / "benchmarks" / "evidence.py"), "measure", "speed"]
    refused = subprocess.run(script, capture_output=True, text=True)
    assert refused.returncode == 2 and "speed: no such result; known are overhead" in refused.stderr
    assert evidence.depends_on("speed") == []


# --- numbers of pages -------------------------------------------------------------------------------------------------


def test_every_measured_number_of_the_pages_is_the_one_of_its_file():
    assert claims.problems() == []


def test_the_page_of_lost_hosts_is_the_one_of_its_file():
    assert host_losses.TABLE.read_text(encoding="utf-8") == host_losses.page(host_losses.kept())


def test_every_result_is_on_a_page():
    quoted = {claim.result for claim in claims.load()[0]} | {"host_losses"}
    assert [file.stem for file in (ROOT / RESULTS).glob("*.json") if file.stem not in quoted] == []


@pytest.fixture
def quoted(tmp_path, monkeypatch):
    """A page that quotes a result; returns a function that writes it with another text and returns what is wrong."""
    for directory in ("docs/results", RESULTS):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "docs/results/README.md").touch()
    monkeypatch.setitem(KEPT, "speed", Kept(f"{RESULTS}/speed.json", "speed.py", ("speed.py",)))
    (tmp_path / RESULTS / "speed.json").write_text('{"times_s": [2.0, 1.0, 4.5], "error": 1.66e-7}')
    (tmp_path / claims.MANIFEST).write_text(
        'sections = ["README.md#Measured"]\nsettings."README.md" = ["4 MB"]\n'
        '[[claims]]\npage = "README.md"\nresult = "speed"\nlet.all = "sorted(times_s)"\n'
        'texts = ["takes {median(all):.1f} s ({all[-1]:.1f} s), to {error:.1e}"]\n'
    )

    def problems(text: str) -> list[str]:
        (tmp_path / "README.md").write_text(text)
        return claims.problems(tmp_path)

    return problems


RIGHT = "# Measured\nWith 4 MB it takes 2.0 s (4.5 s),\nto 1.7e-7.\n"


def test_a_page_agrees_with_its_file(quoted):
    assert quoted(RIGHT) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (RIGHT.replace("2.0", "1.9"), "1.9 is 2.0 in speed (median(all):.1f)"),
        (RIGHT.replace("1.7e-7", "1.6e-7"), "1.6e-7 is 1.7e-7 in speed"),
        (RIGHT.replace("takes", "needs"), "has this text of docs/numbers.toml 0 times"),
        (RIGHT + "\n" + RIGHT, "has this text of docs/numbers.toml 2 times"),
        (RIGHT.replace("4 MB", "5 MB"), "lacks the setting of docs/numbers.toml: 4 MB"),
        (RIGHT + "\nA start takes 7 s.\n", "README.md:5: 7 is in a measured part"),
        (RIGHT + "\n| a row | 1.25 |\n", "README.md:5: 1.25 is in a measured part"),
        (RIGHT + "\n## Start\nIt takes 7 s (measured).\n", "README.md:6: 7 is in a measured part"),
        (RIGHT + "\n## Start\nIt takes 7 s (`benchmarks/results/x.json`).\n", "README.md:6: 7 is in a measured part"),
    ],
)
def test_a_number_without_its_file_is_found(quoted, text, problem):
    assert any(problem in found for found in quoted(text)), quoted(text)


def test_settings_and_code_are_not_measured(quoted):
    assert quoted(RIGHT + "\nOf 4 groups `--seconds 30` in [x](y-2.5.json).\n\n## Settings\nThe limit is 60 s.\n") == []


def test_the_numbers_of_a_new_result_go_into_the_page(quoted, tmp_path):
    quoted(RIGHT.replace("2.0", "1.9").replace("4.5", "11.0"))
    claims.write(tmp_path)
    assert (tmp_path / "README.md").read_text() == RIGHT
