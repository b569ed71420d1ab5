"""Histories that have no violation, and planted bugs: each breaks one rule of the protocol or of its shell, and the
simulation has to find it by that rule. ``python -m tests.sim.planted`` lists the bugs with the seeds that find them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import pytest

from megatron_ft.proof import explore
from megatron_ft.proof.explore import Draw
from megatron_ft.proof.simulated_cluster import play

SEEDS = [pytest.param(range(150), id="few"), pytest.param(range(150, 600), id="more", marks=pytest.mark.long)]
"""For ``pytest.mark.parametrize``: of one kind of histories."""


def check_histories(seeds: range, draw: Draw, option: str, finish: float = 0.7) -> None:
    """Check that no history of these seeds has a violation, and that this share of them comes to the last step;
    ``option``: that of the command which replays one."""
    failed, ends = explore.explore(seeds, jobs=1, draw=draw)
    assert failed is None, f"replay it: {explore.COMMAND} {option} --seed {failed}"
    assert sum(ends.values()) == len(seeds) and set(ends) <= {"finished", "nobody is left"}
    assert ends["finished"] > finish * len(seeds)


class Bug(NamedTuple):
    """Attributes:
    plant: plants the bug with ``monkeypatch``.
    violation: a part of the violation that the bug leads to. A history with other violations only does not count: the
        simulation may be wrong itself.
    seeds: are played one after the other until one shows it; for a rare bug these are seeds near one that does.
    draw: makes a scenario of a seed.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    violation: str
    seeds: range
    draw: Draw

    def caught_by(self, monkeypatch: pytest.MonkeyPatch) -> int | None:
        """Plant the bug, and return the first seed whose history has the violation; None if none has."""
        self.plant(monkeypatch)
        return next((seed for seed in self.seeds if self._shows(seed)), None)

    def _shows(self, seed: int) -> bool:
        return any(self.violation in found for found in play(self.draw(seed)).violations)


def registry(seeds: range, draw: Draw):
    """Return an empty registry, name -> ``Bug``, and the decorator that fills it. ``seeds``, ``draw``: the defaults."""
    bugs: dict[str, Bug] = {}

    def mutation(name: str, violation: str, seeds: range = seeds, draw: Draw = draw):
        def add(plant):
            bugs[name] = Bug(plant, violation, seeds, draw)
            return plant

        return add

    return bugs, mutation


def main() -> None:
    for name in ("mutations", "agent_mutations", "device_mutations", "fail_over_mutations", "policy_mutations"):
        for bug, planted in importlib.import_module(f"tests.sim.{name}").MUTATIONS.items():
            with pytest.MonkeyPatch.context() as patch:
                print(f"{name}: seed {planted.caught_by(patch)} shows {planted.violation!r} if {bug}")


if __name__ == "__main__":
    main()
