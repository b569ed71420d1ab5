"""The groups that hold another state than the others, and the checksums that show it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ft.core.detection import state_divergence
from megatron_ft.core.exactness.batches import Sent
from megatron_ft.core.protocol.messages import GroupFailed, RunHalted
from megatron_ft.core.protocol.signals import ChecksumsRequested
from megatron_ft.errors import InvariantBroken, StartOver
from megatron_ft.run.engines import tensor_checksum
from megatron_ft.run.engines.port import TAIL
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.run.state_checksum import StateCheck, differing
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.run.step_timer import Slots, slots_of_group
from megatron_ft.types import View

GROUPS = st.dictionaries(st.integers(0, 40), st.integers(0, 3), min_size=1, max_size=12)


@given(GROUPS)
def test_the_minority_is_every_group_outside_the_largest_set_of_equal_states(states):
    found = state_divergence.compare(states)
    sets = {state: {g for g, of in states.items() if of == state} for state in states.values()}
    sizes = sorted(map(len, sets.values()), reverse=True)
    if len(sets) == 1:
        assert found == state_divergence.Comparison()
    elif sizes[0] > max(sizes[1], 1):
        right = max(sets.values(), key=len)
        assert set(found.minority) == states.keys() - right and not found.tied
    else:
        assert not found.minority and set(map(frozenset, found.tied)) == set(map(frozenset, sets.values()))


@given(GROUPS, st.permutations(range(4)))
def test_the_comparison_depends_on_equality_alone(states, renamed):
    assert state_divergence.compare(states) == state_divergence.compare(
        {g: renamed[of] for g, of in reversed(states.items())}
    )


@given(GROUPS, st.sets(st.integers(0, 40)))
def test_groups_that_have_just_come_back_are_no_witnesses(states, doubted):
    """The others decide, as if they were alone; and if they are equal, the state is theirs, however few they are."""
    found = state_divergence.compare(states, doubted)
    witnesses = {group: state for group, state in states.items() if group not in doubted}
    among = state_divergence.compare(witnesses)
    if len(set(states.values())) == 1:
        assert found == state_divergence.Comparison()
    elif not witnesses or among.tied:
        assert not found.minority and {group for groups in found.tied for group in groups} == states.keys()
    else:
        right = next(state for group, state in witnesses.items() if group not in among.minority)
        assert set(found.minority) == {group for group, state in states.items() if state != right} and not found.tied


def test_two_wrong_groups_that_came_back_do_not_expel_the_right_one():
    assert state_divergence.compare({0: 7, 1: 8, 2: 8}).minority == (0,)
    assert state_divergence.compare({0: 7, 1: 8, 2: 8}, {1, 2}).minority == (1, 2)
    assert state_divergence.compare({0: 7, 1: 8}, {1}).minority == (1,)
    assert state_divergence.compare({0: 7, 1: 8, 2: 8}, {0, 1, 2}).tied == ((0,), (1, 2))
    assert state_divergence.compare({0: 7, 1: 9, 2: 8, 3: 8}, {2, 3}).tied == ((0,), (1,), (2, 3))


def test_a_group_is_doubted_until_all_of_its_state_is_compared_after_a_step_of_its_own():
    view = View(5, (0, 1, 2, 3), "", step=20, entered={1: 10, 2: 20, 4: 3})
    assert [step for step in range(30) if state_divergence.compares_all(view, step)] == [20]
    assert not state_divergence.compares_all(View(0, (0, 1), "the run starts", behind=(1,)), 0)
    never = {step: state_divergence.doubted(view, step, 0) for step in range(40)}
    assert never[2] == set() and never[3] == never[9] == {4}
    assert never[10] == {1, 4}, "the entry of 1 compares all; what it finds is not yet known"
    assert never[11] == never[19] == {1} and never[20] == {1, 2} and never[21] == never[39] == {2}
    within = {step: state_divergence.doubted(view, step, 8) for step in range(40)}
    assert within[18] == {1} and within[19] == set() and within[28] == {2} and within[29] == set()


def test_a_group_that_takes_its_state_in_a_view_is_no_witness_in_that_step():
    """All of the state is compared there; a wrong state that was handed over has no more witnesses than before."""
    view = View(5, (0, 1, 2, 3), "", step=20, source=0, behind=(1,))
    assert [step for step in range(30) if state_divergence.compares_all(view, step)] == [20]
    assert {step: state_divergence.doubted(view, step, 0) for step in (19, 20, 21)} == {19: set(), 20: {1}, 21: set()}
    assert state_divergence.compare({0: 7, 1: 7, 2: 8, 3: 8}, {1}).minority == (0, 1)


@given(st.integers(0, 3), st.integers(1, 200), st.integers(0, 300))
def test_a_pass_looks_at_all_of_the_state_after_the_entry(more, period, entered):
    """``pass_steps`` is what :func:`doubted` asks for, from the steps at which the checksums are really due."""
    check = StateCheck(Words(torch.zeros(1)), period)
    trusted = entered + 1 + check.pass_steps + more
    view = View(1, (0, 1), "", step=entered, entered={1: entered})
    assert not state_divergence.doubted(view, trusted, check.pass_steps)
    assert {check.due(step) for step in range(entered + 1, trusted)} - {None} == set(range(check.chunks))


@given(st.dictionaries(st.integers(0, 40), st.booleans(), min_size=1))
def test_only_fewer_than_half_of_the_groups_leave_for_their_gradients(flagged):
    leaving = state_divergence.nonfinite_minority(flagged)
    guilty = {group for group, flag in flagged.items() if flag}
    assert set(leaving) == (guilty if len(guilty) < len(flagged) / 2 else set())


def engine_of(slots: int = 0) -> TorchNativeEngine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    engine = TorchNativeEngine(model, torch.optim.AdamW(model.parameters()), loss, slots=slots)
    loss(model, torch.randn(4, 7)).backward()
    engine.optimizer.step()
    return engine


NAMES = [name for name, _ in engine_of().state_tensors()]


def test_the_state_is_all_that_is_handed_over_to_other_groups():
    engine = engine_of()
    state = engine.state()
    saved = {*state["model"]} | {f"{key} {number}" for number, of in state["optimizer"]["state"].items() for key in of}
    kinds = [name.split()[0] for name in NAMES]
    assert sum(map(kinds.count, ("parameter", "buffer", "optimizer"))) == len(saved) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_the_state_counts(name):
    engine = engine_of()
    check = StateCheck(engine, 8)
    tensor = dict(engine.state_tensors())[name].detach().view(-1)
    bits = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before, parts = check.whole(0), [check.of_step(step) for step in range(8)]
    everything = StateCheck(engine, 1)
    details = everything.details(0)
    for bit in range(0, 8 * tensor.element_size() - 1, 5):
        element = 7 * bit % tensor.numel()
        tensor.view(bits)[element] ^= 1 << bit
        assert check.whole(0) != before
        assert sum(a != b for a, b in zip(parts, map(check.of_step, range(8)), strict=True)) == 1
        assert differing(details, everything.details(0)) == [name]
        tensor.view(bits)[element] ^= 1 << bit
    assert check.whole(0) == before


class Words:
    """An engine whose state is one tensor of 64-bit words."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_tensors(self):
        yield "parameter words", self.values


@given(st.integers(1, 300), st.integers(0, 299), st.integers(1, 2**63 - 1), st.booleans())
def test_changes_of_two_words_do_not_cancel(more, one, change, opposite):
    """Opposite changes, two flipped signs (the same change twice is none modulo 2^64 then) and words that change places."""
    other, values = one + more, torch.arange(one + more + 1) ** 3
    before = StateCheck(Words(values.clone()), 0).whole(0)
    changed = values.clone()
    changed[one] += change
    changed[other] += -change if opposite else change
    assert StateCheck(Words(changed), 0).whole(0) != before
    signs = values.clone()
    signs[[one, other]] ^= -(2**63)
    assert StateCheck(Words(signs), 0).whole(0) != before
    swapped = values.clone()
    swapped[[one, other]] = values[[other, one]]
    assert StateCheck(Words(swapped), 0).whole(0) != before


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_words_are_hashed_alike_one_by_one_and_together(words):
    together = [word & 2**64 - 1 for word in tensor_checksum._mixed_words(torch.tensor(words)).tolist()]
    assert together == [tensor_checksum._mixed(word & 2**64 - 1) for word in words]


def test_the_layout_of_a_tensor_in_memory_does_not_count():
    one, other = engine_of(), engine_of()
    weight = other.model[0].weight
    weight.data = weight.data.t().contiguous().t()
    assert StateCheck(one, 1).whole(0) == StateCheck(other, 1).whole(0)


@pytest.mark.parametrize("period", [1, 3, 8, 64, 100])
def test_all_of_the_state_is_checked_in_every_period(period):
    check = StateCheck(Words(torch.zeros(1)), period)
    chunks = {check.due(step) for step in range(10 * period)} - {None}
    assert chunks == set(range(len(chunks)))
    assert {check.due(step) for step in range(1001, 1001 + period)} - {None} == chunks


SAID = st.tuples(st.floats(0, 100, width=32), st.booleans(), st.integers(1, 2**48 - 1))


@given(st.integers(1, 4), st.lists(SAID, max_size=9))
def test_the_reports_of_all_groups_are_in_the_sum(positions, said):
    groups = len(said) + 1
    total = torch.zeros(groups * slots_of_group(positions) + TAIL + 3)
    engine = FakeEngine(total.numel(), groups * slots_of_group(positions))
    for group, (seconds, suspect, checksum) in enumerate(said):
        for position in range(positions):
            engine.buckets = [torch.zeros_like(total)]
            slots = Slots(engine, group, position, positions)
            if position == 0:
                slots.say_seconds(seconds)
            slots.say_suspect(suspect)
            own = checksum - position if checksum > position else checksum
            slots.say_checksums((own, checksum, 0))
            slots.say_batches(Sent(1 + position, checksum, 7, own, group % 2))
            total += engine.buckets[0]
    engine.buckets = [total]
    read = Slots(engine, 0, 0, positions)
    assert read.seconds() == [*(seconds for seconds, _, _ in said), 0.0]
    assert read.suspects() == {group for group, (_, suspect, _) in enumerate(said) if suspect}
    for position, batches in enumerate(read.batches()):
        owns = {
            group: checksum - position if checksum > position else checksum for group, (*_, checksum) in enumerate(said)
        }
        assert batches == {group: Sent(1 + position, said[group][2], 7, own, group % 2) for group, own in owns.items()}
    states, begun, made = read.checksums()
    assert states == {
        group: tuple(checksum - position if checksum > position else checksum for position in range(positions))
        for group, (_, _, checksum) in enumerate(said)
    }
    assert begun == {group: (checksum,) * positions for group, (_, _, checksum) in enumerate(said)} and not made


class FakeEngine:
    """Bucket 0 of an engine, which is all that ``Slots`` uses."""

    def __init__(self, numbers: int, slots: int) -> None:
        self.buckets, self.slots = [torch.zeros(numbers)], slots

    def local(self, bucket: int) -> torch.Tensor:
        return self.buckets[bucket]

    reduced = local


def compared(rates: list[float], made: list[float], entered=None, wrong=()) -> list[Exception | tuple[int, ...]]:
    """Let groups compare their learning rates in step 5, which they have set (``rates``), and with which they have made the
    step before; return what each raises, or the groups that it names. Those of ``entered`` have entered in these steps, and
    those of ``wrong`` have another weight; then all of the state is compared."""
    said: dict = {}
    total = torch.zeros(len(rates) * slots_of_group(1) + TAIL)
    guards, found = [], list[Exception | tuple[int, ...]]()
    for group, rate in enumerate(rates):
        engine, fake = engine_of(), FakeEngine(total.numel(), len(total) - TAIL)
        engine.optimizer.param_groups[0]["lr"] = made[group]
        with engine.hyperparameters.step():
            pass
        engine.optimizer.param_groups[0]["lr"] = rate
        agreement = MagicMock()
        agreement.clone.return_value = agreement
        agreement.put, agreement.get = said.__setitem__, said.get
        slots, env = Slots(fake, group), MagicMock(group=group, incarnation=0, position=0)
        rank = MagicMock(env=env, agreement=agreement)
        guards.append(StateGuard(rank, slots, StateCheck(engine, 0), MagicMock(suspect=False)))
        guards[-1].say(3, engine.hyperparameters)  # nothing differs then
        fake.buckets[0].zero_()
        guards[-1].say(5, engine.hyperparameters)
        if group in wrong:
            engine.model[0].weight.data[1, 2] += 1
        if entered:
            guards[-1].say_all(5)
        total += fake.buckets[0]
        fake.buckets = [total]
    with ThreadPoolExecutor(len(rates)) as pool:
        view = View(7, tuple(range(len(rates))), "", step=5, entered=entered or {})
        for outcome in [pool.submit(guard.compare, 5, view) for guard in guards]:
            found.append(outcome.exception() or outcome.result())
    return found


def test_hyperparameters_that_differ_are_named_in_their_step_with_both_values():
    right, _, wrong = compared([0.1, 0.1, 0.2], [0.1] * 3)
    assert right == () and isinstance(wrong, StartOver)
    assert (
        "at the beginning of step 5 was not that of groups 0 1 (lr of parameter group 0 is 0.1 in group 0 and 0.2 in "
        in (str(wrong))
    )
    for tied in compared([0.1, 0.1], [0.3, 0.1]):
        assert isinstance(tied, InvariantBroken)
        assert "in step 4 the hyperparameters of group 0 and group 1 differ (lr of parameter group 0 is 0.3 in" in str(
            tied
        )
    assert compared([0.1] * 3, [0.2] * 3) == [()] * 3


def test_a_group_enters_only_with_the_state_of_those_that_stayed():
    """Also two of them with the same wrong state; the message names the tensor, both checksums and the first step."""
    same = [0.1] * 3
    assert compared(same, same, entered={1: 5, 2: 5}) == [()] * 3
    stayed, *wrong = compared(same, same, entered={1: 5, 2: 5}, wrong={1, 2})
    assert stayed == (1, 2), "their part of the step must not be used"
    for group, error in enumerate(wrong, start=1):
        assert isinstance(error, StartOver)
        assert re.fullmatch(
            rf"group {group} does not enter: its state at the beginning of step 5 was not that of group 0 \(parameter "
            rf"0.weight, float32 on cpu, checksums \w+ and \w+; from step 3 on at the earliest\); it takes theirs",
            str(error),
        )
    for error in compared(same, same, entered={2: 5}, wrong={1}):
        assert isinstance(error, InvariantBroken)
        assert "none of them is held by most of the groups that have not just come back (group 2 has)" in str(error)


def test_the_tensors_of_two_groups_that_differ_are_named_before_either_is_told():
    said, engines = {}, [engine_of(), engine_of()]
    guards = []
    for group, engine in enumerate(engines):
        agreement, check = MagicMock(), StateCheck(engine, 0)
        agreement.clone.return_value = agreement
        agreement.put, agreement.get = said.__setitem__, said.get
        agreement.announce = lambda signal: (
            isinstance(signal, ChecksumsRequested) and [one.publish(signal.step) for one in guards]
        )
        env = MagicMock(group=group, incarnation=0, position=0)
        env.config.ranks_per_group = 1
        guards.append(StateGuard(MagicMock(env=env, agreement=agreement), MagicMock(), check, MagicMock()))
    engines[1].model[0].bias.data[2] += 1
    states = {group: guard.states.whole(7) for group, guard in enumerate(guards)}
    guards[0].accuse("at the end", 7, View(0, (0, 1), "the run starts"), states)
    ((_, line),) = guards[0]._history.note.call_args_list
    assert (line["what"], line["tensors"], line["position"]) == (["parameter 0.bias"], 1, 0)


def test_a_difference_is_said_to_be_no_older_than_the_last_comparison_that_found_none():
    """Of the part that differs, or of the whole state: that is known to be equal since its oldest part was compared."""
    guard = StateGuard(MagicMock(), MagicMock(), MagicMock(chunks=3), MagicMock())
    sums = {"weight": (1, "float32")}, {"weight": (2, "float32")}

    def since(chunk: int | None) -> int:
        return int(re.search(r"from step (\d+) on", guard._tensors(chunk, ["weight"], (0, 1), *sums))[1])

    guard.found_equal(4)
    assert since(None) == since(1) == 4
    for step, chunk in enumerate((0, 1, 2, 0), start=6):
        guard.found_equal(step, chunk)
    assert [since(None), since(0), since(1), since(2)] == [7, 9, 7, 8]


def test_a_tie_of_all_groups_stops_the_run_also_after_a_group_was_accused_before():
    agreement = MagicMock()
    guard = StateGuard(MagicMock(agreement=agreement), MagicMock(), MagicMock(pass_steps=0), MagicMock())
    view = View(0, (0, 1, 2), "the run starts")
    assert guard.accuse("before", 3, view, {0: 7, 1: 8, 2: 7}) == (1,) and guard.awaits_view(view)
    assert guard.accuse("some", 5, view, {0: 5, 2: 6}) == ()
    assert guard.accuse("later", 9, View(1, (0, 2), "group 1 is out"), {0: 5, 2: 6}) == ()
    said = [call.args[0] for call in agreement.announce.call_args_list]
    assert [type(signal) for signal in said if not isinstance(signal, MagicMock)] == [GroupFailed, RunHalted]
