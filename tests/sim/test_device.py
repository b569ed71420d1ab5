"""Histories of groups on devices whose communicators behave like NCCL's: no violations, rare cases, planted bugs."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from megatron_ft.proof import explore
from megatron_ft.proof.scenario import DEVICE_SHARE, ON_DEVICE, draw, draw_on_devices
from megatron_ft.proof.simulated_cluster import play
from megatron_ft.proof.simulated_device import Device
from tests.sim.device_mutations import MUTATIONS
from tests.sim.planted import SEEDS, check_histories

ON_DEVICES = partial(draw_on_devices, draw)


@pytest.mark.parametrize("seeds", SEEDS)
def test_histories_without_a_violation(seeds):
    check_histories(seeds, ON_DEVICES, "--device")


def test_a_fourth_of_all_scenarios_is_on_devices():
    drawn = [draw(seed).device for seed in range(400)]
    assert abs(sum(drawn) / len(drawn) - DEVICE_SHARE) < 0.1
    assert all(ON_DEVICES(seed).device for seed in range(8))


def test_the_histories_reach_what_is_rare(monkeypatch):
    seen = Counter()
    end, spoil, built, close = Device._end, Device._spoil, Device._built, Device.close

    def ends(self, launched):
        seen["an abort races with a completion"] += launched not in self._stream
        end(self, launched)

    def spoils(self, launched):
        used = self.buffers.get(launched.key[-1])
        seen["a kernel returns into a buffer that was given up"] += used is not launched.buffer
        spoil(self, launched)

    def builds(self):
        built(self)
        seen["a member dies during an init"] += not self._ready

    async def closes(self):
        usable = await close(self)
        seen["a communicator is stuck"] += not usable
        return usable

    for name, patch in (("_end", ends), ("_spoil", spoils), ("_built", builds), ("close", closes)):
        monkeypatch.setattr(Device, name, patch)
    for seed in range(100):
        scenario = ON_DEVICES(seed)
        seen.update(fault.kind for fault in scenario.faults)
        for line in play(scenario).lines:
            seen["an init ends by its deadline"] += line["event"] == "view" and "no end of init" in line["reason"]
            seen["exits in init"] += line["event"] == "fault" and line["what"].split(": ")[1].startswith(
                "exits in init"
            )
    stories = (
        "an abort races with a completion",
        "a kernel returns into a buffer that was given up",
        "a member dies during an init",
        "a communicator is stuck",
        "an init ends by its deadline",
    )
    missing = [name for name in (*ON_DEVICE, *stories) if not seen[name]]
    assert not missing, f"no history reached: {missing}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    assert MUTATIONS[name].caught_by(monkeypatch) is not None, f"no history shows that {name}"


def test_a_failing_history_is_replayed_with_its_own_command(monkeypatch, capsys):
    MUTATIONS["a watchdog kills the processes whose operations do not end"].plant(monkeypatch)
    assert explore.main(["--device", "--policy", "spare", "--seeds", "100", "--jobs", "1"]) == 1
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("shrunk")).split(": ")[1]
    assert "--device --policy spare" in command
    assert explore.main(command.removeprefix(explore.COMMAND).split()) == 1


def test_a_history_without_devices_is_that_of_before():
    """The faults of devices come on top: the scenario is the same otherwise."""
    scenario = next(draw(seed) for seed in range(100) if not draw(seed).device and draw(seed).faults)
    on_devices = ON_DEVICES(scenario.seed)
    faults = tuple(fault for fault in on_devices.faults if fault.kind not in ON_DEVICE)
    assert replace(on_devices, device=False, faults=faults) == scenario
