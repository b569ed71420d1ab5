"""Groups host restricted stacks: after a real kill, the record shows which samples the heirs had in memory.

Groups freeze in an all-reduce of a step, so the others wait in theirs until the test says go on: their prefetchers have
all the time they need, and none of the tests depends on how fast anything is.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from megatron_ft.cluster.faults import kill
from megatron_ft.run.injection_points import Breakpoint
from tests import support
from tests.support import GROUPS, PER_GROUP

STEP = 3

# The example, with a dataset that notes each call before it is answered.
TRAIN = """
from pathlib import Path
from megatron_ft.run.session import Session

class Noted:
    def __init__(self, inner, path):
        self.inner, self.path = inner, path
    def __call__(self, microbatch):
        with self.path.open("a") as file:
            file.write(f"{microbatch}\\n")
        return self.inner(microbatch)
    def __getattr__(self, name):
        return getattr(self.inner, name)

plain = Session.dataset
def noted(self, *args, **kwargs):
    return Noted(plain(self, *args, **kwargs), self.env.run_dir / f"calls.g{self.group}")
Session.dataset = noted
"""


@pytest.fixture
def script(tmp_path) -> Path:
    return support.changed_script(tmp_path / "train.py", TRAIN)


def calls(run: support.Run, group: int) -> list[str]:
    """Return the calls of that group's dataset so far, in order."""
    try:
        return (run.directory / f"calls.g{group}").read_text().split()
    except FileNotFoundError:
        return []


def wait_for_the_stacks(run: support.Run, groups: set[int]) -> None:
    """Wait until those groups hold their stacks: the next step's share comes after them, one call at a time."""
    ready = {f"{STEP + 1}/{group}.0": group for group in groups}
    support.wait_for(lambda: all(first in calls(run, group) for first, group in ready.items()), run)


def names(step: int, *shards: int) -> list[str]:
    return [f"{step}/{shard}.{index}" for shard in shards for index in range(PER_GROUP)]


def patched(run: support.Run) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Return, by group, the microbatches that were prefetched and those that were fetched; each has one line."""
    found: tuple[dict[int, list[str]], dict[int, list[str]]] = ({}, {})
    for line in run.events("patch"):
        assert line["step"] == STEP
        for by_group, kind in zip(found, ("prefetched", "fetched"), strict=True):
            if line[kind]:
                by_group.setdefault(line["group"], []).extend(line[kind])
    everything = [name for by_group in found for own in by_group.values() for name in own]
    assert len(everything) == len(set(everything)) == sum(line["patched"] for line in run.events("recovery"))
    return found


def struck(tmp_path, data_dir, script, *dead: int, **changes) -> support.Run:
    """Start a run whose groups ``dead`` are killed together, in an all-reduce of the step."""
    holds = [Breakpoint(group, STEP, "reduce", 3) for group in dead]
    run = support.start(tmp_path / "run", data_dir, holds, script=script, **changes)
    wait_for_the_stacks(run, set(range(GROUPS)) - set(dead))
    # Otherwise a group that has not come so far would live to take over a part of the other.
    support.wait_for(lambda: all(kill.is_frozen(run.directory, group) for group in dead), run)
    run.strike(*holds)
    return run


def test_a_host_has_the_lost_groups_samples_in_memory(tmp_path, data_dir, reference, script):
    """Shard 2 is hosted by groups 2 and 1: group 1 takes its part over without reading anything, 0 and 3 read
    theirs."""
    run = struck(tmp_path, data_dir, script, 2, redundancy=2)
    run.check(reference)
    lost = names(STEP, 2)
    assert patched(run) == ({1: lost[:2]}, {0: [lost[2]], 3: [lost[3]]})
    (recovery,) = run.events("recovery")
    assert (recovery["patched"], recovery["patched_by"], recovery["unhosted"]) == (4, {"0": 1, "1": 2, "3": 1}, 2)
    assert max(Counter(calls(run, 1)).values()) == 1
    shown = support.ft("report", run.directory, env=os.environ | {"COLUMNS": "160"}).stdout
    assert "2 / 2" in shown, shown


@pytest.mark.long
def test_a_shard_that_lost_both_hosts_is_fetched_by_any_group(tmp_path, data_dir, reference, script):
    """Of the hosts of shard 1, group 0 is left; shard 2 has no host left.

    The survivors may hear of both deaths at once or one after the other; only in the first case is it certain which
    group takes shard 2, so the test does not ask.
    """
    run = struck(tmp_path, data_dir, script, 1, 2, redundancy=2)
    run.check(reference)
    prefetched, fetched = patched(run)
    assert set(prefetched) == {0} and set(prefetched[0]) <= set(names(STEP, 1))
    everything = sum(prefetched.values(), []) + sum(fetched.values(), [])
    assert set(everything) == set(names(STEP, 1, 2)) and set(names(STEP, 2)) <= set(sum(fetched.values(), []))


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"redundancy": 1}, {"placement": "full"}], ids=["its own shard", "everything"])
def test_a_group_that_prefetches_only_its_share_fetches_what_it_takes_over(
    tmp_path, data_dir, reference, script, changes
):
    run = struck(tmp_path, data_dir, script, 2, **changes)
    run.check(reference)
    prefetched, fetched = patched(run)
    assert not prefetched
    assert sorted(sum(fetched.values(), [])) == names(STEP, 2)
    (recovery,) = run.events("recovery")
    assert recovery["unhosted"] == (PER_GROUP if "redundancy" in changes else 0)


@pytest.mark.long
def test_a_dataset_that_draws_from_the_global_generators_changes_nothing(tmp_path, data_dir, reference, script):
    """Its draws are not those of dropout, and in a thread beside training they would be: it stays in the training
    thread."""
    draws = "import random, numpy, torch; random.random(); numpy.random.rand(); torch.rand(1); return self.inner"
    text = (
        script.read_text()
        .replace("return self.inner", draws)
        .replace("class Noted:", "class Noted:\n    read_ahead = False")
    )
    script.write_text(text)
    run = support.start(tmp_path / "run", data_dir, script=script)
    run.check(reference)
    for group in range(GROUPS):
        compared = f"0/{(group + 1) % GROUPS}.0"  # loaded in the first step to compare it with that group's
        made = calls(run, group)
        made.remove(compared)
        assert made == [name for step in range(support.STEPS) for name in names(step, group)]
