"""Decisions about checkpoints: the writers, the period, the checkpoint to load and those to delete."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import schema
from megatron_ft.core.lifecycle.checkpoint_policy import (
    LEAST_SAVES,
    LONGEST_S,
    Found,
    checkpoint_period,
    expected_uptime_s,
    newest_first,
    parts,
    period_s,
    to_delete,
    writers,
)
from megatron_ft.core.lifecycle.checkpoint_protocol import CheckpointSchedule
from megatron_ft.errors import WIPED_OUT
from megatron_ft.host import job_restore
from megatron_ft.host.job_restore import WholeJob

seconds = st.floats(1e-3, 1e7)
one_found = st.builds(
    Found,
    path=st.uuids().map(str),
    step=st.integers(0, 20),
    complete=st.booleans(),
    unfinished=st.booleans(),
    saved_at=st.floats(0, 10),
    reason=st.just("why"),
)
# A complete checkpoint has a manifest.
founds = st.lists(
    one_found.filter(lambda one: not (one.complete and one.unfinished)), max_size=12, unique_by=lambda one: one.path
)


# --- writing ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 12))
def test_every_tensor_is_in_one_part_and_no_part_has_more_than_a_tensor_too_much(sizes, count):
    found = parts(sizes, count)
    assert len(found) == count
    assert sorted(index for part in found for index in part) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in part) for part in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert found == parts(list(sizes), count) and all(list(part) == sorted(part) for part in found)


def test_tensors_without_content_are_spread_too():
    assert [len(part) for part in parts([0] * 8, 4)] == [2, 2, 2, 2]


live = st.sets(st.integers(0, 40), min_size=1, max_size=20)


@given(live, st.dictionaries(st.integers(0, 40), st.integers(0, 4)), st.integers(1, 12))
def test_writers_live_are_different_and_spread_over_domains(living, domains, count):
    chosen = writers(living, domains, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(living)) and set(chosen) <= living
    domain = {group: domains.get(group, f"alone {group}") for group in living}
    written = [sum(domain[group] == one for group in chosen) for one in set(domain.values())]
    for one, number in zip(set(domain.values()), written, strict=True):
        if number < sum(value == one for value in domain.values()):  # it could give another one
            assert number >= max(written) - 1


def test_writers_of_two_racks_alternate():
    assert writers([0, 1, 2, 3, 4, 5], {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}, 4) == (0, 3, 1, 4)


# --- how often --------------------------------------------------------------------------------------------------------


@given(seconds, seconds, seconds)
def test_the_period_is_where_the_derivative_of_availability_is_zero(save, uptime, restart):
    period = checkpoint_period(save, uptime, restart)
    rounding = 1e-12 * period**2  # of the difference of two large numbers
    assert period**2 - 2 * save * period == pytest.approx(2 * save * (uptime + restart), rel=1e-6, abs=rounding)
    assert period >= 2 * save


@given(seconds, st.one_of(seconds, st.just(math.inf)), st.floats(0, 1e4))
def test_the_period_keeps_its_limits(save, uptime, write):
    period = period_s(save, uptime, write)
    assert period >= LEAST_SAVES * save and period >= write
    assert period <= max(LONGEST_S, LEAST_SAVES * save, write)
    if 40 * save < uptime < 1e5 and save < 1 and write < 1e-3:  # the limits are not in its way
        assert period == pytest.approx(checkpoint_period(save, uptime, 0.0))


@given(seconds, seconds, st.integers(0, 50))
def test_the_uptime_is_the_prior_until_something_is_seen(ran, prior, ends):
    assert expected_uptime_s(0, 0, prior) == prior
    assert prior <= expected_uptime_s(ran, 0, prior) < math.inf
    assert expected_uptime_s(ran, ends + 1, prior) < expected_uptime_s(ran, ends, prior)


def test_much_evidence_outweighs_the_prior():
    assert expected_uptime_s(100 * 3600, 99, 30 * 86400) == pytest.approx(8.2 * 3600, rel=0.01)


@given(st.floats(1, 1e4), st.floats(1, 1e3))
def test_the_nearest_step_boundary_is_taken(period, step):
    boundaries = [n * step for n in range(1, int(period / step) + 3)]
    first = next(at for at in boundaries if at >= CheckpointSchedule(setting=period).wait_s(0.0, step))
    assert abs(first - period) <= min(abs(at - period) for at in boundaries) + 1e-6 or first == step


# --- what is there ----------------------------------------------------------------------------------------------------


@given(founds, st.integers(-1, 5))
def test_the_right_checkpoints_are_deleted(found, keep):
    gone = to_delete(found, keep)
    left = [one for one in found if one not in gone]
    complete = [one for one in newest_first(found) if one.complete]
    assert [one for one in newest_first(left) if one.complete] == complete[: max(keep, 1)]
    for one in found:
        if not one.complete:  # with a manifest it may be whole, of a later step it may still be written
            assert (one in gone) == bool(one.unfinished and complete and one.step < complete[0].step)


@pytest.mark.parametrize("hosts", [1, 2])
def test_launchers_on_several_hosts_do_not_start_the_job_again_and_report_it(tmp_path, capfd, hosts):
    """They report it when there is a checkpoint to start from; otherwise the run's own last line has said all."""
    section = {"checkpoint": {"directory": str(tmp_path)}, "rejoin": {"enabled": True}}
    job = WholeJob(schema.resolve({"fault_tolerance": section}, groups=2), hosts)
    assert not job.again(WIPED_OUT) and not capfd.readouterr().err
    (tmp_path / "step-00000004-0").mkdir()
    assert not job.again(1) and not capfd.readouterr().err
    assert job.again(WIPED_OUT) == (hosts == 1)
    said = capfd.readouterr().err
    words = "the whole job is started again" if hosts == 1 else "When it has ended on all of them, run the same command"
    assert words in said


def test_the_whole_job_waits_before_it_starts_again_only_if_it_has_saved_nothing_since(tmp_path, monkeypatch):
    waits = [50.0]
    monkeypatch.setattr(job_restore, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
    section = {"checkpoint": {"directory": str(tmp_path)}, "rejoin": {"enabled": True}}
    job = WholeJob(schema.resolve({"fault_tolerance": section}, groups=2), 1)
    for step in (4, 8, 8, 8, 9):
        (tmp_path / f"step-{step:08}-0").mkdir(exist_ok=True)
        assert job.again(WIPED_OUT)
    _, first, saved, second, third, recovered = waits
    assert first == saved == recovered == 0 < second < third
