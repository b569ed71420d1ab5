"""Ranks of several agents on one machine share its cores."""

from __future__ import annotations

import pytest
import torch

from megatron_ft.utils import cores
from megatron_ft.worker import progress_counters, thread_share


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def agent(shared, *starts: str):
    place = progress_counters.directory(shared)
    for name in starts:
        progress_counters.create(place / name)
    return place


def test_the_ranks_of_all_living_agents_count_and_restarts_do_not(tmp_path, monkeypatch, threads):
    place = agent(tmp_path, "g0.p0", "g0.1.p0", "g1.p0")
    monkeypatch.setenv(progress_counters.VARIABLE, str(place / "g0.1.p0"))
    monkeypatch.setenv(progress_counters.SHARES_CORES, "1")
    monkeypatch.setattr(cores, "usable", lambda: 12)
    threads(6)
    thread_share.take()
    assert torch.get_num_threads() == 6, "one agent has shared the cores already"
    agent(tmp_path, "g2.p0", "g2.p1")
    (tmp_path / "megatron_ft-pulses-abandoned").mkdir()
    bound = agent(tmp_path, "g8.p0")
    (bound / "cores").write_text("100000 100001")  # as srun binds two agents of a node to different cores
    thread_share.take()
    assert torch.get_num_threads() == 3
    threads(2)
    thread_share.take()
    assert torch.get_num_threads() == 2, "fewer than its share"


def test_the_users_own_number_of_threads_stays(tmp_path, monkeypatch, threads):
    agent(tmp_path, "g2.p0")
    monkeypatch.setenv(progress_counters.VARIABLE, str(agent(tmp_path, "g0.p0") / "g0.p0"))
    monkeypatch.delenv(progress_counters.SHARES_CORES, raising=False)
    monkeypatch.setattr(cores, "usable", lambda: 2)
    threads(2)
    thread_share.take()
    assert torch.get_num_threads() == 2
