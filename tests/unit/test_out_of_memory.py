"""Counts of the kernel's out-of-memory killer, read from files like those of cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.utils.out_of_memory import Counter, Watch, counters

EVENTS = {2: ("memory.events", "memory.max"), 1: ("memory.oom_control", "memory.limit_in_bytes")}


def host(path: Path, version: int) -> tuple[Path, Path, Path]:
    """Make the files of a process in the group ``job/step``; return the directory of that group."""
    mounted = path / "mounted"
    root = mounted if version == 2 else mounted / "memory"
    for group in ("", "job", "job/step"):
        (root / group).mkdir(parents=True, exist_ok=True)
        write(root / group, version, 0)
    (path / "own").write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n0::/\n")
    (path / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    return root, mounted, path / "own"


def write(group: Path, version: int, count: int, limit: str = "max") -> None:
    events, most = EVENTS[version]
    (group / events).write_text(f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n")
    (group / most).write_text(f"{limit}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_innermost_group_that_counts_more_is_named_with_its_limit(tmp_path, version):
    root, mounted, own = host(tmp_path, version)
    watch = Watch(counters(mounted, own, tmp_path / "vmstat"))
    assert watch.reason() == ""
    write(root / "job", version, 1, "64000000000")
    (tmp_path / "vmstat").write_text("pgfault 13\noom_kill 4\n")
    said = watch.reason()
    assert said == (
        f"out of memory: the kernel has killed a process of cgroup {root / 'job'} (limit 64 GB) for it; dmesg says more"
    )
    assert watch.reason() == said, "another rank that was killed with it"


def test_without_groups_the_hosts_count_is_used_and_without_a_count_nothing_is_said(tmp_path):
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    watch = Watch(counters(tmp_path, tmp_path / "none", tmp_path / "vmstat"))
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 4\n")
    assert "a process of this host for it" in watch.reason()
    (tmp_path / "vmstat").write_text("pgfault 12\n")
    assert counters(tmp_path, tmp_path / "none", tmp_path / "vmstat") == []
    assert Watch([]).reason() == ""


@given(text=st.text())
def test_any_text_is_read(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("any") / "events"
    file.write_text(text, encoding="utf-8")
    assert (Counter("it", file).read() or 0) >= 0
    assert Counter("it", file, file).said().startswith("out of memory: ")
