"""The groups that hold another state than the others, and the checksums that show it."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_ft.core.detection import state_divergence
from megatron_ft.core.protocol.messages import RunHalted
from megatron_ft.core.protocol.signals import ChecksumsRequested, StateDiverged
from megatron_ft.engines import tensor_checksum
from megatron_ft.engines.port import TAIL
from megatron_ft.engines.torch_native import TorchNativeEngine
from megatron_ft.types import View
from megatron_ft.worker.state_checksum import StateCheck, differing
from megatron_ft.worker.state_guard import StateGuard
from megatron_ft.worker.step_timer import Slots, slots_of_group

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
    numbers = kinds.count("optimizer") - 1  # the settings of the one parameter group
    assert kinds.count("parameter") + kinds.count("buffer") + numbers == len(saved)
    assert NAMES[-1] == "optimizer settings of parameter group 0"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("optimizer settings")])
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


def test_a_learning_rate_that_differs_is_a_state_that_differs():
    engine = engine_of()
    before = StateCheck(engine, 1).whole(0)
    engine.optimizer.param_groups[0]["lr"] *= 1.0000001
    assert StateCheck(engine, 1).whole(0) != before


def test_the_layout_of_a_tensor_in_memory_does_not_count():
    one, other = engine_of(), engine_of()
    weight = other.model[0].weight
    weight.data = weight.data.t().contiguous().t()
    assert StateCheck(one, 1).whole(0) == StateCheck(other, 1).whole(0)


@pytest.mark.parametrize("period", [1, 3, 8, 64, 100])
def test_all_of_the_state_is_checked_in_every_period(period):
    check = StateCheck(engine_of(), period)
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
            slots.say_state(checksum - position if checksum > position else checksum)
            total += engine.buckets[0]
    engine.buckets = [total]
    read = Slots(engine, 0, 0, positions)
    assert read.seconds() == [*(seconds for seconds, _, _ in said), 0.0]
    assert read.suspects() == {group for group, (_, suspect, _) in enumerate(said) if suspect}
    assert read.states() == {
        group: tuple(checksum - position if checksum > position else checksum for position in range(positions))
        for group, (_, _, checksum) in enumerate(said)
    }


class FakeEngine:
    """Bucket 0 of an engine, which is all that ``Slots`` uses."""

    def __init__(self, numbers: int, slots: int) -> None:
        self.buckets, self.slots = [torch.zeros(numbers)], slots

    def local(self, bucket: int) -> torch.Tensor:
        return self.buckets[bucket]

    reduced = local


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
        guards.append(StateGuard(env, MagicMock(), check, MagicMock(), agreement, MagicMock()))
    engines[1].model[0].bias.data[2] += 1
    states = {group: guard._states.whole(7) for group, guard in enumerate(guards)}
    guards[0].accuse("at the end", 7, {}, states)
    ((_, line),) = guards[0]._history.note.call_args_list
    assert (line["what"], line["tensors"], line["position"]) == (["parameter 0.bias"], 1, 0)


def test_a_tie_of_all_groups_stops_the_run_also_after_a_group_was_accused_before():
    agreement = MagicMock()
    guard = StateGuard(MagicMock(), MagicMock(), MagicMock(), MagicMock(), agreement, MagicMock())
    view = View(0, (0, 1, 2), "the run starts")
    assert guard.accuse("before", 3, {}, {0: 7, 1: 8, 2: 7}) == (1,) and guard.awaits_view(view)
    assert guard.accuse("some", 5, {}, {0: 5, 2: 6}, everyone=False) == ()
    assert guard.accuse("later", 9, {}, {0: 5, 2: 6}) == ()
    said = [call.args[0] for call in agreement.announce.call_args_list]
    assert [type(signal) for signal in said if not isinstance(signal, MagicMock)] == [StateDiverged, RunHalted]
