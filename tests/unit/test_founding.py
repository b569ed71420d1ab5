"""Hosts that find each other through the run directory, in which others have been before."""

from __future__ import annotations

import json
import threading

import pytest

from megatron_ft.errors import LaunchError
from megatron_ft.launch import founding, record

PATIENT_S = 60.0


def meet(run_dir, hosts: int, order) -> list[dict[int, dict]]:
    """What each host finds when they come in that order."""
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
def test_all_find_the_same_and_nobody_takes_an_earlier_launch_for_this_one(tmp_path, order):
    first = meet(tmp_path, 3, order)
    again = meet(tmp_path, 3, order)
    for found in (first, again):
        assert found[0] == found[1] == found[2]
        assert {rank: card["address"] for rank, card in found[0].items()} == {rank: f"10.0.0.{rank}" for rank in range(3)}
    assert first[0][1]["nonce"] != again[0][1]["nonce"]


def test_what_an_earlier_launch_has_left_is_no_host(tmp_path):
    meet(tmp_path, 2, (0, 1))
    with pytest.raises(LaunchError, match="host 1 has not come to .* within 0.5 s; start the launcher there"):
        founding.meet(tmp_path, 0, 2, {"address": "10.0.0.0"}, 0.5)
    with pytest.raises(LaunchError, match="another host of this launch has not come"):
        founding.meet(tmp_path, 1, 2, {"address": "10.0.0.1"}, 0.5)


def test_who_comes_to_an_empty_directory_misses_host_0(tmp_path):
    with pytest.raises(LaunchError, match="host 0 has not come"):
        founding.meet(tmp_path, 1, 2, {"address": "10.0.0.1"}, 0.3)
    with pytest.raises(LaunchError, match="host 0 has not come"):
        founding.first_address(tmp_path, 0.3)


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_half_a_file_is_no_card(tmp_path, text):
    (tmp_path / record.ETCD).mkdir()
    (tmp_path / record.ETCD / "0.json").write_text(text)
    with pytest.raises(LaunchError):
        founding.first_address(tmp_path, 0.2)
    (tmp_path / record.ETCD / "0.json").write_text(json.dumps({"address": "10.0.0.9"}))
    assert founding.first_address(tmp_path, 0.2) == "10.0.0.9"
