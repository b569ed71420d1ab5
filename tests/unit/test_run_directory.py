"""The agent's part of a run directory."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from signal import Signals

import pytest

from megatron_ft.errors import NOT_SAVED, LaunchError
from megatron_ft.record import history, run_directory, run_state
from megatron_ft.types import Exit
from megatron_ft.utils import shared_file


def test_hosts_that_list_their_ranks_at_the_same_time_lose_none(tmp_path, monkeypatch):
    """Host 1 lists all ranks between host 0's look at the parts and its writing of the whole."""
    (tmp_path / run_directory.RANKS).mkdir()
    plain, interrupted = shared_file.write_json, []

    def replace(path, value) -> None:
        if path.name == "ranks.json" and not interrupted:
            interrupted.append(True)
            run_directory.write_ranks(tmp_path, [{"group": 1}], host=1)
        plain(path, value)

    monkeypatch.setattr(shared_file, "write_json", replace)
    run_directory.write_ranks(tmp_path, [{"group": 0}], host=0)
    assert interrupted and json.loads((tmp_path / "ranks.json").read_text()) == [{"group": 0}, {"group": 1}]


@pytest.mark.parametrize(
    ("ended", "aside", "refused"),
    [
        (False, run_directory.NOTHING, "already holds a run that did not reach its end"),
        (True, run_directory.NOTHING, "already holds a finished run .last step 3."),
        (False, run_directory.UNFINISHED, ""),
        (True, run_directory.UNFINISHED, "already holds a finished run .last step 3."),
        (False, run_directory.ANY, ""),
        (True, run_directory.ANY, ""),
    ],
)
def test_the_record_of_an_earlier_start_is_put_aside_or_refused(tmp_path, ended, aside, refused):
    history.append(tmp_path, "end" if ended else "step", step=3)
    before = history.read(tmp_path)
    with pytest.raises(LaunchError, match=refused) if refused else nullcontext():
        run_directory.prepare(tmp_path, overwrite=False, aside=aside)
    kept = tmp_path if refused else tmp_path / run_directory.EARLIER / "0001"
    assert history.read(kept) == before and bool(history.read(tmp_path)) == bool(refused)


def test_the_starts_of_a_group_that_took_part_in_a_step_are_found(tmp_path):
    assert not run_state.read(tmp_path).has_committed(1, 0)
    lines = [
        ("view", {"epoch": 0, "live": [0, 1], "incarnations": {}}),
        ("step", {"step": 0, "epoch": 0, "live": [0, 1]}),
        ("view", {"epoch": 1, "live": [0], "incarnations": {}}),
        ("step", {"step": 1, "epoch": 1, "live": [0]}),
        ("view", {"epoch": 2, "live": [0, 1], "incarnations": {"1": 2}}),
    ]
    for event, fields in lines:
        history.append(tmp_path, event, **fields)
    assert [run_state.read(tmp_path).has_committed(1, incarnation) for incarnation in range(3)] == [True, False, False]
    history.append(tmp_path, "step", step=2, epoch=2, live=[0, 1])
    assert [run_state.read(tmp_path).has_committed(1, incarnation) for incarnation in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"step": 99}, ""),  # without checkpoints
        ({"step": 99, "saved": 100}, ""),
        (
            {"step": 99, "saved": 22},
            "100 steps are done, but step 100 is not saved; the newest checkpoint is of step 22:",
        ),
        ({"step": 99, "saved": None}, "step 100 is not saved; no checkpoint is complete"),
        ({}, ""),  # the record could not be written, and the store is gone
    ],
)
def test_the_unsaved_part_of_the_end_of_a_run_is_reported(end, words):
    found = run_directory.what_is_not_saved(end)
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    "death, signalled, words",
    [
        (
            ("SIGINT", None),
            Signals.SIGTERM,
            "SIGTERM stopped the run before the script of group 1 had ended: its final model",
        ),
        (
            ("SIGKILL", None),
            None,
            "after that the script of group 1 failed: rank 0 on node1 (pid 7) ended with SIGKILL",
        ),
        (
            (None, 3),
            Signals.SIGTERM,
            "after that the script of group 1 failed: rank 0 on node1 (pid 7) ended with exit code 3",
        ),
    ],
)
def test_what_became_of_a_script_after_the_last_step_is_reported(death, signalled, words):
    ended = [(Path("g1.log"), Exit(1, 0, 7, "node1", *death), signalled)]
    said = run_directory.what_failed_after({"step": 7}, ended)
    assert said.startswith("all 8 steps are done, but ") and words in said and said.endswith("[output in g1.log]")
    assert run_directory.what_failed_after({"step": 7}, []) == ""


def test_the_exit_code_of_a_run_is_that_of_its_last_line():
    end, failed = {"event": "end"}, {"event": "not_saved", "exit_code": NOT_SAVED}
    code, codes = None, []
    for line in (
        {"event": "start"},
        {"event": "step"},
        end,
        failed,
        {"event": "start"},
        {"event": "stop", "exit_code": 3},
    ):
        code = run_state.outcome(line, code)
        codes.append(code)
    assert codes == [None, None, 0, NOT_SAVED, None, 3]
