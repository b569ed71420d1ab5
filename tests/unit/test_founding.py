"""Hosts that find each other through a run directory with files of earlier runs."""

from __future__ import annotations

import json
import threading

import pytest

from megatron_ft.agent.etcd import founding
from megatron_ft.errors import LaunchError
from megatron_ft.runlog import run_directory

PATIENT_S = 60.0


def meet(run_dir, hosts: int, order) -> list[dict[int, dict]]:
    """Return what each host finds when they come in that order."""
    found: dict[int, dict] = {}
    threads = []
    for rank in order:
        card = {"address": f"10.0.0.{rank}"}

        def come(rank: int = rank, card: dict = card) -> None:
            found[rank] = founding.meet(run_dir, rank, hosts, card, PATIENT_S)

        threads.append(threading.Thread(target=come, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(PATIENT_S)
    return [found[rank] for rank in range(hosts)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_hosts_find_the_same_and_none_takes_an_earlier_launch_for_this_one(tmp_path, order):
    first = meet(tmp_path, 3, order)
    again = meet(tmp_path, 3, order)
    for found in (first, again):
        assert found[0] == found[1] == found[2]
        assert {rank: card["address"] for rank, card in found[0].items()} == {
            rank: f"10.0.0.{rank}" for rank in range(3)
        }
    assert first[0][1]["nonce"] != again[0][1]["nonce"]


def test_files_of_an_earlier_launch_are_no_hosts(tmp_path):
    meet(tmp_path, 2, (0, 1))
    with pytest.raises(LaunchError, match="host 1 has not come to .* within 0.5 s; start the launcher there"):
        founding.meet(tmp_path, 0, 2, {"address": "10.0.0.0"}, 0.5)
    with pytest.raises(LaunchError, match="another host of this launch has not come"):
        founding.meet(tmp_path, 1, 2, {"address": "10.0.0.1"}, 0.5)


def test_a_host_in_an_empty_directory_misses_host_0(tmp_path):
    with pytest.raises(LaunchError, match="host 0 has not come"):
        founding.meet(tmp_path, 1, 2, {"address": "10.0.0.1"}, 0.3)
    with pytest.raises(LaunchError, match="host 0 has not come"):
        founding.first_address(tmp_path, 0.3)


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_half_a_file_is_no_card(tmp_path, text):
    (tmp_path / run_directory.ETCD).mkdir()
    (tmp_path / run_directory.ETCD / "0.json").write_text(text)
    with pytest.raises(LaunchError):
        founding.first_address(tmp_path, 0.2)
    (tmp_path / run_directory.ETCD / "0.json").write_text(json.dumps({"address": "10.0.0.9"}))
    assert founding.first_address(tmp_path, 0.2) == "10.0.0.9"
