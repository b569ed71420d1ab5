"""The cores of a rank's threads: a container's quota and affinity count, not the machine's cores."""

from __future__ import annotations

import os

import pytest

from megatron_ft.host import forkserver
from megatron_ft.utils import cores

MINE = len(os.sched_getaffinity(0))


def place(tmp_path, own: str, files: dict[str, str]):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "cgroup", tmp_path / "own"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, MINE),
        ("0::/a\n", {"a/cpu.max": "99900000 100000\n"}, MINE),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 1),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, MINE),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, MINE),
        ("", {}, MINE),
    ],
)  # fmt: skip
def test_the_smallest_of_affinity_and_quotas_counts(tmp_path, own, files, expected):
    assert cores.usable(*place(tmp_path, own, files)) == expected


def test_without_control_groups_the_affinity_counts(tmp_path):
    assert cores.usable(tmp_path / "none", tmp_path / "nothing") == MINE


def test_ranks_share_the_usable_cores_and_the_users_own_setting_wins(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "usable", lambda: 12)
    assert forkserver.common_environment(4)["OMP_NUM_THREADS"] == "3"
    assert forkserver.common_environment(100)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert forkserver.common_environment(4)["OMP_NUM_THREADS"] == "7"
