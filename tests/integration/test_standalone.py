"""A script that is started with python alone: one process, one group, no agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft.config.schema import ConfigError
from megatron_ft.errors import LaunchError
from megatron_ft.run import session

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import megatron_ft

def samples(microbatch):
    return torch.full((2, 8), 0.1 * (1 + microbatch.index + 10 * microbatch.shard + 0.5 * microbatch.step))

def train(steps, **options):
    session = megatron_ft.init(**options)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    engine = session.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean())
    losses = {}
    for step in session.steps(steps):
        losses[step] = session.train_step(engine, samples).loss
        session.log({"step": step})
        assert session.is_writer and session.live == (0,) and session.rank == 0
    saved = session.save_final(Path(sys.argv[1]) / "model.pt", lambda path: torch.save(model.state_dict(), path))
    assert torch.equal(torch.load(saved)["weight"], model.weight)
    events = [json.loads(line) for line in (session.env.run_dir / "history.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("log") == len(losses) and events[-1]["event"] == "end"
    return losses, session.env.run_dir

def by_hand(steps, shards, per_shard):
    from megatron_ft.types import Microbatch
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(steps):
        optimizer.zero_grad()
        found = [model(samples(Microbatch(step, s, i))).square().mean() for s in range(shards) for i in range(per_shard)]
        loss = torch.stack(found).mean()
        loss.backward()
        optimizer.step()
        losses[step] = float(loss.detach())
    return losses

config = sys.argv[2]
first, place = train(3, standalone=True)
again, _ = train(3)
assert first == again and not place.exists(), "a second run in the same process ends the first"
saved, _ = train(4, config=config)
resumed, place = train(6, config=config)
assert list(resumed) == [4, 5]
expected = by_hand(6, shards=4, per_shard=4)
assert all(abs(loss - expected[step]) < 1e-5 * expected[step] for step, loss in {**saved, **resumed}.items())
print(place)
"""

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "fault_tolerance": {"min_groups": 2, "failure_domains": ["a", "a", "b", "b"]},
}


def test_a_script_without_a_launcher_trains_the_same_steps_alone_and_resumes_and_leaves_nothing(tmp_path):
    """With the config of a run of four groups, whose settings for several groups do not stop it."""
    section = {**CONFIG["fault_tolerance"], "checkpoint": {"directory": str(tmp_path / "checkpoints")}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "fault_tolerance": section}))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tmp_path / "config.json")]
    env = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines() == ["megatron_ft: " + session.ALONE] * 3  # the first run was asked to stand alone
    assert not Path(ended.stdout.splitlines()[-1]).exists()


def test_one_of_several_processes_of_another_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(LaunchError, match="WORLD_SIZE.*8 hosts.*megatron-ft launch"):
        session.init()


def test_a_config_for_several_ranks_in_a_group_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"pipeline": {"stages": 2}}))
    with pytest.raises(ConfigError, match="the config needs 2 ranks in a group"):
        session.init(path, standalone=True)


def test_standalone_is_refused_under_the_launcher(monkeypatch):
    monkeypatch.setenv("MEGATRON_FT_RUN_ID", "1")
    with pytest.raises(ConfigError, match="leave standalone out"):
        session.init(standalone=True)
