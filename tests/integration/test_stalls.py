"""Groups that make no progress without an error: storage that is away, a script that hangs between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.record import invariants
from tests import support
from tests.integration.test_hosts import BEATS, Agents

LIMIT_S = 2.0
STORAGE = """
import time
from pathlib import Path
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.config.rank_env import RankEnvironment
HERE, FIRST, ONLY = Path({here!r}), {first}, {only}
read = PackedDataset.get
def get(self, microbatch):
    if microbatch.step < FIRST:
        time.sleep(0.15)  # a slow disk: a limit for pieces of work is learned from pieces that the agent can see
    elif ONLY in (None, RankEnvironment.from_env().group):
        while not (HERE / "back").exists():
            time.sleep(0.02)
    return read(self, microbatch)
PackedDataset.get = PackedDataset.__call__ = get
"""


def storage(directory: Path, first: int, only: int | None = None) -> Path:
    """Return the training script on a file system that is away from step ``first`` on, until the file ``back`` is
    there; ``only`` for that group, if it is given."""
    text = STORAGE.format(here=str(directory), first=first, only=only)
    return support.changed_script(directory / "train.py", text)


def test_storage_that_is_away_for_all_groups_costs_no_group(tmp_path, data_dir, reference):
    """Storage is away for longer than the limit after which one group alone would be given up, and the run goes on as
    if nothing had happened."""
    settings = {"hang_timeout_s": LIMIT_S, "stall_notice_s": 1.5}
    run = support.start(tmp_path / "run", data_dir, detector=settings, script=storage(tmp_path, 5))

    def is_said() -> bool:
        return any(line["seconds"] > 1.5 * LIMIT_S - 0.1 for line in run.events("stall"))

    support.wait_for(is_said, run)
    (tmp_path / "back").touch()
    run.check(reference)
    assert not run.events("fault") and len(run.events("view")) == 1
    first, *_, last = run.events("stall")
    assert first["late"] and first["place"] == "inside the dataset" and last["over"], run.events("stall")


@pytest.mark.long
def test_storage_that_is_away_for_several_hosts_costs_none_of_them(agents):
    """Each agent has one group, and knows only from the other agent that storage is away there, too."""
    here = agents.directory
    agents.script = storage(here, 5)
    settings = {**BEATS, "hang_timeout_s": LIMIT_S, "stall_notice_s": 1.5}
    agents.config = support.write_config(here / "config.json", detector=settings)
    for host in range(2):
        agents.start(host, hosts=2, groups=2)
    run = support.Run(here / "run", agents.agents[0], 2)

    def is_said() -> bool:
        return any(line["seconds"] > 1.5 * LIMIT_S - 0.1 for line in run.events("stall"))

    support.wait_for(is_said, run)
    (here / "back").touch()
    said = agents.said(0), agents.said(1)
    assert [agent.returncode for agent in agents.agents.values()] == [0, 0], said
    assert not run.events("fault") and len(run.events("view")) == 1, run.history
    assert not invariants.check_history(run.history, 2 * support.PER_GROUP)
    assert {line["place"] for line in run.events("stall")} == {"inside the dataset"}


@pytest.mark.long
def test_one_group_alone_whose_storage_is_away_is_given_up(tmp_path, data_dir, reference):
    settings = {"hang_timeout_s": LIMIT_S}
    run = support.start(tmp_path / "run", data_dir, detector=settings, script=storage(tmp_path, 5, only=1))
    support.wait_for(lambda: any(1 not in view["live"] for view in run.events("view")), run)
    (tmp_path / "back").touch()
    run.check(reference)
    (fault,) = run.events("fault")
    assert fault["group"] == 1 and "hang_timeout_s); it is inside the dataset" in fault["detail"], fault


@pytest.mark.long
def test_a_run_that_is_lost_to_a_stall_is_started_again_from_its_checkpoint(tmp_path, data_dir):
    """Storage is away for longer than the longest limit: the ranks are ended although they hang, and the job goes on."""
    settings = {"hang_timeout_s": LIMIT_S, "storage_timeout_s": 1.5 * LIMIT_S}
    saves = {"directory": str(tmp_path / "saved"), "period_s": 0.1}
    options = {"groups": 2, "rejoin": {"enabled": True}, "checkpoint": saves, "script": storage(tmp_path, 5)}
    run = support.start(tmp_path / "run", data_dir, detector=settings, **options)
    support.wait_for(lambda: (run.directory / "earlier" / "0001").is_dir(), run)
    (tmp_path / "back").touch()
    output = run.finish()
    assert run.process.returncode == 0, output + run.logs()
    assert "the whole job is started again" in output and "storage_timeout_s" in output
    assert run.events("resume") and run.events("end")


HANGS = """
import time
from pathlib import Path
from megatron_ft.run.session import Session
HERE = Path({here!r})
passes = Session.train_step
def train_step(self, *arguments):
    while self.group == 1 and self._role.step == 4 and not (HERE / "go").exists():
        time.sleep(0.02)
    return passes(self, *arguments)
Session.train_step = train_step
"""


@pytest.fixture
def agents(tmp_path, data_dir):
    agents = Agents(tmp_path, data_dir)
    yield agents
    agents.kill()


@pytest.mark.long
def test_a_script_that_hangs_between_two_steps_is_reported_with_the_groups_that_wait_for_it(agents):
    """The group is on another host than the agent that reports it."""
    here = agents.directory
    agents.script = support.changed_script(here / "train.py", HANGS.format(here=str(here)))
    agents.config = support.write_config(here / "config.json", detector={**BEATS, "stall_notice_s": 1.0})
    for host in range(2):
        agents.start(host, hosts=2, groups=2)
    run = support.Run(here / "run", agents.agents[0], 2)

    def hangs() -> list[dict]:
        return [line for line in run.events("stall") if line["place"] == "between two steps"]

    support.wait_for(lambda: len(hangs()) == 2, run)
    (here / "go").touch()
    said = agents.said(0), agents.said(1)
    assert [agent.returncode for agent in agents.agents.values()] == [0, 0], said
    first, second, *_ = hangs()
    assert (first["late"], first["waiting"]) == ([1], [0]) and second["seconds"] >= 2 * first["seconds"]
    assert "group 0 waits for group 1, between two steps, " in said[0] and "waits for" not in said[1], said
    assert len(run.events("view")) == 1 and not run.events("fault")
