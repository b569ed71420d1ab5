"""Ranks that have other data than the others end with an error that names hosts and values, before they train."""

from __future__ import annotations

import socket

import pytest

from tests import support

SCRIPT = """
import argparse, os
import torch
import megatron_ft

parser = argparse.ArgumentParser()
for name in ("data", "steps", "seed"):
    parser.add_argument("--" + name)
args = parser.parse_args()
session = megatron_ft.init(seed=int(args.seed))
start = os.environ["MEGATRON_FT_GROUP"], os.environ["MEGATRON_FT_INCARNATION"]
data = session.dataset(args.data, seq_len=16 if start in {others!r} else 32)
dataset = {dataset}
model = torch.nn.Linear(1, 1)
loss_fn = lambda model, batch: model(batch["input_ids"].float().mean().view(1, 1) / 512).square().mean()
engine = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn)
for step in session.steps(int(args.steps)):
    session.train_step(engine, dataset)
"""
HOST = socket.gethostname()
EVERY = [(str(group), "0") for group in range(support.GROUPS)]


def script(tmp_path, *others: tuple[str, str], dataset: str = "data"):
    """Return a script that trains on the expression ``dataset``; ``others`` are the (group, start) with another
    sequence length."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(others=set(others), dataset=dataset))
    return path


def start(tmp_path, data_dir, train, name: str = "run", **options) -> support.Run:
    return support.start(tmp_path / name, data_dir, script=train, own=(), groups=2, **options)


@pytest.mark.parametrize("group", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_whose_groups_have_different_data_makes_no_step(tmp_path, data_dir, group):
    run = start(tmp_path, data_dir, script(tmp_path, (str(group), "0")))
    said = " ".join(run.finish().split())
    assert run.process.returncode == 2 and "Traceback" not in said, said + run.logs()
    assert not run.events("step")
    assert (
        "sequence length is " in said and f"of group {group} on {HOST}" in said and f"{1 - group} on {HOST}" in said
    ), said
    assert {"16", "32"} <= set(said.replace(";", " ").split()), said


@pytest.mark.long
@pytest.mark.parametrize(
    "dataset",
    ["lambda microbatch: data(microbatch)", "(data, session.dataset(args.data, seq_len=8))[0]"],
    ids=["wrapped", "another for evaluation"],
)
def test_a_group_comes_back_whose_dataset_is_known_only_in_its_first_step(tmp_path, data_dir, dataset):
    gate = support.Gate(tmp_path, slowly=150, script=script(tmp_path, dataset=dataset))
    run = start(tmp_path, data_dir, gate.script, steps=150, rejoin={"enabled": True})
    support.wait_for_step(run, 2)
    support.kill([support.inject.pid_of(run.directory, 1, 0)])
    support.wait_for(lambda: run.events("rejoined"), run)
    gate.open()
    run.check()


@pytest.mark.long
def test_a_group_without_a_fingerprint_beside_one_with_makes_no_step(tmp_path, data_dir):
    dataset = (
        'data if start[0] == "0" else (session.dataset(args.data, seq_len=8), lambda microbatch: data(microbatch))[1]'
    )
    run = start(tmp_path, data_dir, script(tmp_path, dataset=dataset))
    said = " ".join(run.finish().split())
    assert run.process.returncode == 2 and not run.events("step"), said + run.logs()
    assert "dataset fingerprint is " in said and "none" in said.replace(";", " ").split(), said


def test_a_group_that_comes_back_with_other_data_is_refused_and_the_others_train_on(tmp_path, data_dir):
    gate = support.Gate(tmp_path, slowly=150, script=script(tmp_path, ("1", "1")))
    rejoin = {"enabled": True, "restarts_per_hour": 1}
    run = start(tmp_path, data_dir, gate.script, steps=150, rejoin=rejoin)
    support.wait_for_step(run, 2)
    support.kill([support.inject.pid_of(run.directory, 1, 0)])
    support.wait_for(lambda: "sequence length is 16 for rank 0 of group 1" in run.logs(), run)
    gate.open()
    run.check()
    assert [line["group"] for line in run.events("survivor")] == [0]
    assert not run.events("rejoined") and not any(line["joined"] for line in run.events("view"))


def test_a_run_does_not_go_on_with_other_data_than_its_checkpoint(tmp_path, data_dir):
    saved = {"directory": str(tmp_path / "saved"), "period_s": 1e6}
    start(tmp_path, data_dir, script(tmp_path), "first", steps=2, checkpoint=saved).check()
    run = start(tmp_path, data_dir, script(tmp_path, *EVERY), "second", steps=4, checkpoint=saved)
    said = " ".join(run.finish().split())
    assert run.process.returncode == 2 and "Traceback" not in said, said + run.logs()
    assert f"sequence length is 16 for rank 0 of group 0 on {HOST}" in run.logs()
    assert f"but checkpoint {tmp_path}/saved/" in said and "was saved with 32" in said and not run.events("step"), said
