"""Every kept result lists the paths that it depends on, and is reported when these have changed since it was
measured."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
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
        ("unblock", "megatron_ft/collectives/gloo_sockets.py"),
        ("history", "megatron_ft/runlog/run_record.py"),
        ("history", "megatron_ft/core/detection/stragglers.py"),
        ("store_growth", "megatron_ft/core/protocol/key_lifetimes.py"),
        ("store_growth", "tests/growth.py"),
        ("fuzz", "megatron_ft/collectives/framing.py"),
        ("fuzz", "megatron_ft/doctor/meeting.py"),
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
