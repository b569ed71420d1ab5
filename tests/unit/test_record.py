"""The agent's part of a run directory."""

from __future__ import annotations

import json

from megatron_ft.launch import record
from megatron_ft.runtime import history


def test_hosts_that_list_their_ranks_at_the_same_time_lose_none(tmp_path, monkeypatch):
    """Host 1 lists all between host 0's look at the parts and its writing of the whole."""
    (tmp_path / record.RANKS).mkdir()
    plain, interrupted = record.replace, []

    def replace(path, value) -> None:
        if path.name == "ranks.json" and not interrupted:
            interrupted.append(True)
            record.write_ranks(tmp_path, [{"group": 1}], host=1)
        plain(path, value)

    monkeypatch.setattr(record, "replace", replace)
    record.write_ranks(tmp_path, [{"group": 0}], host=0)
    assert interrupted and json.loads((tmp_path / "ranks.json").read_text()) == [{"group": 0}, {"group": 1}]


def test_which_start_of_a_group_had_a_part_in_a_step(tmp_path):
    assert not record.has_committed(tmp_path, 1, 0)
    lines = [
        ("view", {"epoch": 0, "live": [0, 1], "incarnations": {}}),
        ("step", {"step": 0, "epoch": 0, "live": [0, 1]}),
        ("view", {"epoch": 1, "live": [0], "incarnations": {}}),
        ("step", {"step": 1, "epoch": 1, "live": [0]}),
        ("view", {"epoch": 2, "live": [0, 1], "incarnations": {"1": 2}}),
    ]
    for event, fields in lines:
        history.append(tmp_path, event, **fields)
    assert [record.has_committed(tmp_path, 1, incarnation) for incarnation in range(3)] == [True, False, False]
    history.append(tmp_path, "step", step=2, epoch=2, live=[0, 1])
    assert [record.has_committed(tmp_path, 1, incarnation) for incarnation in range(3)] == [True, False, True]
