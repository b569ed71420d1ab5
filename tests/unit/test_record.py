"""The agent's part of a run directory."""

from __future__ import annotations

import json

from megatron_ft.launch import record


def test_hosts_that_list_their_ranks_at_the_same_time_lose_none(tmp_path, monkeypatch):
    """Host 1 lists all between host 0's look at the parts and its writing of the whole."""
    (tmp_path / record.RANKS).mkdir()
    plain, interrupted = record.replace, []

    def replace(path, value) -> None:
        if path.name == "ranks.json" and not interrupted:
            interrupted.append(True)
            record.write_ranks(tmp_path, [{"group": 1}], hosts=2, host=1)
        plain(path, value)

    monkeypatch.setattr(record, "replace", replace)
    record.write_ranks(tmp_path, [{"group": 0}], hosts=2, host=0)
    assert interrupted and json.loads((tmp_path / "ranks.json").read_text()) == [{"group": 0}, {"group": 1}]
