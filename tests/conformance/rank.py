"""One rank of one group, which plays all groups of a step one after the other:

    python -m tests.conformance.rank KIT RANK STORE_PORT OUT

and writes what each check found to OUT, as JSON: name -> error, or null.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.core.exactness import grid
from megatron_ft.data.order import microbatch_seed
from megatron_ft.errors import EngineError
from megatron_ft.run.collectives import state_transfer
from megatron_ft.run.engines.gradient_check import GradientCheck
from megatron_ft.run.engines.port import DIGEST, OWN, Listed, StepResult
from megatron_ft.run.engines.torch_native import TorchNativeEngine
from megatron_ft.types import Microbatch
from tests.conformance import model as toy
from tests.conformance.kits import KITS, Kit, adamw, loss_of

IDS = [Microbatch(0, 0, index) for index in range(5)]
SIZES = {"a size": 2, "another size": 5}
SPLITS = ([IDS[:2], IDS[2:4], IDS[4:]], [IDS, [], []], [[], IDS[3:], IDS[:3]])
"""Plans of one step for three groups."""
PATIENCE = timedelta(seconds=60)
POLL_S = 0.0005


class StoreControl:
    """The ``Control`` of a rank, over torch's store."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self.sent: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def send_words(self, position: int, words: Sequence[int]) -> None:
        number = self.sent[position] = self.sent.get(position, 0) + 1
        self.store.set(f"{self.rank}>{position}/{number}", json.dumps([*words, *(0,) * (8 - len(words))]))

    def heard(self, position: int) -> tuple[int, ...] | None:
        key = f"{position}>{self.rank}/{self.taken.get(position, 0) + 1}"
        if not self.store.check([key]):
            return None
        self.taken[position] = self.taken.get(position, 0) + 1
        return tuple(json.loads(self.store.get(key)))

    def receive_words(self, position: int) -> tuple[int, ...]:
        while (words := self.heard(position)) is None:
            time.sleep(POLL_S)
        return words


class Played:
    """The ``Work`` of one flush; ``computed`` collects the digest of each microbatch."""

    def __init__(self, engine: Any, ids: Sequence[Microbatch], part: int, digests: bool, ready: Any) -> None:
        self.engine, self.ids, self.part, self.asked, self.found = engine, ids, part, digests, {}
        self._ready = ready

    def listed(self) -> Sequence[Listed]:
        return [Listed(one, False, self.part, self.asked) for one in self.ids]

    def closes(self, listed: Sequence[Listed]) -> bool:
        return self._ready is not None

    def ready(self) -> Any:
        return self._ready

    def batch(self, microbatch: Microbatch) -> Any:
        return toy.batch(microbatch.index)

    def seed(self, microbatch: Microbatch) -> int:
        return microbatch_seed(7, microbatch)

    def span(self, kind: str, listed: Listed) -> Any:
        return nullcontext()

    def computed(self, listed: Listed) -> None:
        self.found[listed.microbatch] = self.engine.collect(self.asked)


class Group:
    """The ranks of one group from the side of one of them."""

    def __init__(self, kit: Kit, rank: int, store: dist.Store) -> None:
        self.kit, self.rank, self.layout = kit, rank, kit.layout(rank)
        self.control = StoreControl(dist.PrefixStore("control", store), rank)

    def build(self, dropout: float = 0.0, **settings: Any) -> Any:
        known = {"bucket_mb": 0.004, "slots": 6, "gradient_clipping": 0.5, "seed": 3}
        return self.kit.build(self.layout, dropout, {**known, **settings})

    def compute(
        self, engine: Any, ids: Sequence[Microbatch], part: int = OWN, digests: bool = False, ready: Any = None
    ) -> dict[Microbatch, int]:
        """Compute microbatches. Return the digest of each at this rank."""
        work = Played(engine, ids, part, digests, ready)
        if self.kit.joint:
            engine.flush(self.control, work)
            return work.found
        mine = ids[self.rank :: self.kit.ranks]
        for one in mine:
            engine.add_to(part)
            early = ready if one == mine[-1] else None
            engine.compute(one, work.batch(one), work.seed(one), lambda point: None, early, digests)
            work.computed(Listed(one, False, part))
        return work.found

    def parts(self, engine: Any) -> list[torch.Tensor]:
        """Return what the group contributes: a copy of each local bucket, summed over ranks that share microbatches."""
        found = [engine.local(bucket).clone() for bucket in range(engine.num_buckets)]
        if not self.kit.joint:
            for one in found:
                dist.all_reduce(one)
        return found

    def reduce(self, engine: Any, contributed: Sequence[Sequence[torch.Tensor]]) -> None:
        """Sum the groups' parts as ``run.collectives.bucket_allreduce`` does."""
        for bucket in range(engine.num_buckets):
            total = engine.reduced(bucket).zero_()
            for part in contributed:
                exact, flat = engine.exact(bucket), part[bucket].clone()
                if exact is not None:
                    exact.load(part[bucket], flat)
                total.add_(flat)
            assert engine.exact(bucket) is None or engine.exact(bucket).intact(total), "a checksum is wrong"

    def step(self, engine: Any, split: Sequence[Sequence[Microbatch]], step: int = 0) -> StepResult:
        """Make a step that these groups share."""
        count = sum(map(len, split))
        for _ in range(3):
            contributed = []
            for ids in split:
                engine.begin_step(count)
                self.compute(engine, ids)
                contributed.append(self.parts(engine))
            self.reduce(engine, contributed)
            if not self.agree(engine.must_discard(count)):
                return engine.update(step, count, lambda point: None)
            engine.discard(count)
        raise AssertionError("the grid does not settle")

    def agree(self, flag: bool) -> bool:
        said = torch.tensor(int(flag))
        dist.all_reduce(said)
        return bool(said)

    def bits(self, engine: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in engine.state_tensors()}


def alone(settings: dict[str, Any], steps: int) -> tuple[TorchNativeEngine, list[StepResult]]:
    """Train the same model in this process alone."""
    model = toy.whole()
    known = {"slots": 6, "gradient_clipping": 0.5, "seed": 3, **settings}
    engine = TorchNativeEngine(model, adamw(model.parameters()), loss_of(settings), **known)
    results = []
    for step in range(steps):
        engine.begin_step(len(IDS))
        for one in IDS:
            engine.compute(one, toy.batch(one.index), microbatch_seed(7, one), lambda point: None)
        for bucket in range(engine.num_buckets):
            engine.keep_local(bucket)
        results.append(engine.update(step, len(IDS), lambda point: None))
    return engine, results


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other), f"other names: {set(one) ^ set(other)}"
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    assert not wrong, f"other bits: {wrong[:5]}"


# --- checks -----------------------------------------------------------------------------------------------------------


def trains_what_one_process_trains(group: Group, **settings: Any) -> None:
    """Uneven plans, also a group without any microbatch; clipping; buffers."""
    reference, expected = alone(settings, len(SPLITS))
    loose = group.kit.tolerance
    engine = group.build(**settings)
    for step, split in enumerate(SPLITS):
        result = group.step(engine, split, step)
        assert math.isclose(result.loss, expected[step].loss, rel_tol=1e-5 * loose), (result, expected[step])
        norm = expected[step].gradient_norm
        assert math.isclose(result.gradient_norm, norm, rel_tol=1e-4 * loose), (result, expected[step])
        assert result.tokens == expected[step].tokens, (result, expected[step])
    counted = getattr(getattr(engine, "_scheduler", None), "num_steps", None)  # Megatron's counts samples
    assert counted in (None, toy.SAMPLES * sum(one.microbatches for one in expected)), counted
    known = reference.model.state_dict()
    for name, tensor in group.kit.tensors(engine).items():
        off = (tensor - known[name]).abs()
        if loose > 1:  # Adam turns rounding of a gradient near 0 into a whole step
            assert off.mean() < 1e-5 * loose, (name, off.mean())
        else:
            assert torch.allclose(tensor, known[name], rtol=1e-4, atol=1e-5), (name, off.max())


def counts_tokens(group: Group) -> None:
    trains_what_one_process_trains(group, loss_reduction="token")


def sums_exactly(group: Group) -> None:
    """With exact reduction the bits do not depend on the groups that compute, nor on the order; dropout is on."""
    found = []
    for turn in range(len(SPLITS)):
        engine = group.build(dropout=0.2, exact_bits=grid.MOST_BITS)
        for step in range(2):
            group.step(engine, [list(reversed(ids)) if turn else ids for ids in SPLITS[turn]], step)
        found.append(group.bits(engine))
    same(found[0], found[1])
    same(found[0], found[2])


def gives_equal_digests(group: Group) -> None:
    """A microbatch has the same digest in every order, and none is added to the step when only that is asked for."""
    engine = group.build(dropout=0.2, exact_bits=grid.MOST_BITS)
    group.step(engine, SPLITS[0])
    engine.begin_step(len(IDS))
    before = group.parts(engine)
    first = group.compute(engine, IDS, DIGEST, digests=True)
    assert all(torch.equal(one, other) for one, other in zip(before, group.parts(engine), strict=True))
    engine.begin_step(len(IDS))
    second = group.compute(engine, IDS[::-1], digests=True)
    assert first == second and (not group.kit.joint or len(set(first.values())) == len(IDS)), (first, second)


def keeps_standby_work_apart(group: Group) -> None:
    """Parts count when they are contributed, and then like own work."""
    engine = group.build()
    engine.begin_step(len(IDS))
    group.compute(engine, IDS[:2])
    own = group.parts(engine)
    group.compute(engine, IDS[2:4], part=1)
    group.compute(engine, IDS[4:], part=2)
    assert all(torch.equal(one, other) for one, other in zip(own, group.parts(engine), strict=True)), "not kept apart"
    engine.contribute(1), engine.contribute(2), engine.contribute(3)
    group.reduce(engine, [group.parts(engine)])
    result = engine.update(0, len(IDS), lambda point: None)
    other = group.build()
    expected = group.step(other, [IDS])
    assert math.isclose(result.loss, expected.loss, rel_tol=1e-5)
    for name, tensor in group.kit.tensors(engine).items():
        assert torch.allclose(tensor, group.kit.tensors(other)[name], rtol=1e-4, atol=1e-6), name


def skips_a_step_that_is_not_finite(group: Group) -> None:
    engine = group.build()
    group.step(engine, SPLITS[0])
    before = group.bits(engine)
    spoilt = [*IDS, Microbatch(1, 0, toy.BAD)]
    result = group.step(engine, [spoilt[:3], spoilt[3:]], 1)
    assert not math.isfinite(result.gradient_norm), result
    same(before, group.bits(engine))
    assert not engine.local_finite(), "this group has computed the microbatch whose loss is nan"
    assert math.isfinite(group.step(engine, SPLITS[1], 2).gradient_norm)


def hands_over_its_state(group: Group) -> None:
    """A fresh engine with the state of another one holds the same bits, and makes the same next step."""
    for settings in ({}, {"exact_bits": grid.MOST_BITS}):
        engine, other = group.build(**settings), group.build(**settings)
        for step, split in enumerate(SPLITS[:2]):
            group.step(engine, split, step)
        skeleton, tensors = state_transfer.flatten(engine.state())
        sent = [tensor.clone() for tensor in reversed(tensors)]
        take = partial(_next_of, sent)
        other.load_state(state_transfer.unflatten(json.loads(json.dumps(skeleton)), take))
        same(group.bits(engine), group.bits(other))
        assert engine.fingerprint() == other.fingerprint()
        results = [group.step(one, SPLITS[2], 2) for one in (engine, other)]
        assert results[0] == results[1], results
        same(group.bits(engine), group.bits(other))


def _next_of(sent: list[torch.Tensor], *how: object) -> torch.Tensor:
    return sent.pop()


def repeats_a_reduction(group: Group) -> None:
    """Garbage in the reduced buffers costs nothing but time."""
    engine = group.build()
    engine.begin_step(len(IDS))
    group.compute(engine, IDS)
    contributed = [group.parts(engine)]
    for bucket in range(engine.num_buckets):
        engine.reduced(bucket).fill_(math.nan)
        engine.replace_reduced(bucket)
    group.reduce(engine, contributed)
    result, expected = engine.update(0, len(IDS), lambda point: None), group.step(other := group.build(), [IDS])
    assert result == expected
    same(group.bits(engine), group.bits(other))


def tells_complete_buckets(group: Group) -> None:
    """A bucket that is told to be complete within the last microbatches does not change any more."""
    for settings in ({}, {"exact_bits": grid.MOST_BITS}):
        engine, told = group.build(**settings), dict[int, torch.Tensor]()
        group.step(engine, SPLITS[0])
        engine.begin_step(len(IDS))
        group.compute(engine, IDS[:-1])

        def ready(bucket: int, engine: Any = engine, told: dict[int, torch.Tensor] = told) -> None:
            assert bucket not in told, f"bucket {bucket} is told twice"
            told[bucket] = engine.local(bucket).clone()

        group.compute(engine, IDS[-1:], ready=ready)
        wrong = [bucket for bucket, local in told.items() if not torch.equal(local, engine.local(bucket))]
        assert not wrong, f"buckets {wrong} of {engine.num_buckets} changed later"
        assert bool(told) == group.kit.overlaps, f"buckets {sorted(told)} were told"


def checks_the_gradient_of_a_microbatch(group: Group) -> None:
    """It is found to be that of the loss, and twice that is refused. No bit of the state changes."""
    told: list[float | None] = []
    plain = GradientCheck.check
    for settings in ({}, {"exact_bits": grid.MOST_BITS}, {"loss_reduction": "token"}):
        engine = group.build(0.1, **settings)
        before, told[:] = group.bits(engine), ()
        GradientCheck.check = lambda *given: told.append(plain(*given))
        try:
            _check_gradient(group, engine)
        finally:
            GradientCheck.check = plain
        assert len(told) == 1, told
        unsure = group.kit.tolerance > 1  # fp16 has too few bits for small moves
        assert all(unsure if found is None else abs(found - 1) < 0.2 for found in told), (settings, told)
        same(before, group.bits(engine))
        if settings or None in told:
            continue
        try:
            _check_gradient(group, engine, twice=True)
        except EngineError as error:
            assert "times as large" in str(error) and "a size = 2" in str(error), error
        else:
            raise AssertionError("twice the gradient was not noticed")
        same(before, group.bits(engine))


def _check_gradient(group: Group, engine: Any, twice: bool = False) -> None:
    def flush() -> None:
        group.compute(engine, IDS[: 1 if group.kit.joint else group.kit.ranks])
        for bucket in range(engine.num_buckets):
            engine.local(bucket)[: -engine.tail(bucket)].mul_(1 + twice)

    if group.kit.joint and engine.checks_by_flushes:
        assert engine.check_by_flushes(flush, SIZES)
        return
    engine.begin_step(len(IDS))
    flush()
    engine.check_gradient(SIZES)


def refuses_a_missing_microbatch(group: Group) -> None:
    engine = group.build()
    engine.begin_step(len(IDS))
    group.compute(engine, IDS[:-1])
    group.reduce(engine, [group.parts(engine)])
    try:
        engine.update(0, len(IDS), lambda point: None)
    except AssertionError as error:
        assert "microbatches" in str(error)
    else:
        raise AssertionError("a step without one of its microbatches was committed")


CHECKS: dict[str, Callable[[Group], None]] = {
    check.__name__: check
    for check in (
        trains_what_one_process_trains,
        counts_tokens,
        sums_exactly,
        gives_equal_digests,
        keeps_standby_work_apart,
        skips_a_step_that_is_not_finite,
        hands_over_its_state,
        repeats_a_reduction,
        tells_complete_buckets,
        refuses_a_missing_microbatch,
        checks_the_gradient_of_a_microbatch,
    )
}


def main(name: str, rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(KITS[name].ranks)}  # DeepSpeed asks
    kit = KITS[name]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    where = {"store": dist.PrefixStore("world", store), "rank": rank, "world_size": kit.ranks}
    dist.init_process_group("gloo", timeout=PATIENCE, **where)
    group, found = Group(kit, rank, store), dict[str, str | None]()
    for check in CHECKS:
        try:
            CHECKS[check](group)
            found[check] = None
        except Exception:
            found[check] = traceback.format_exc()
        if group.agree(found[check] is not None) and found[check] is None:
            found[check] = "another rank failed"
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
