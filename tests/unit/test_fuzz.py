"""Hundreds of random inputs to every listener of the project; ``make fuzz`` gives many more."""

from __future__ import annotations

import pytest

from megatron_ft.utils.auth.handshake import Door
from tests import fuzz


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [300, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_random_input_costs_no_memory_no_thread_and_no_service(name, inputs):
    outcome = fuzz.fuzz(name, inputs)
    assert outcome.good, outcome


def test_a_listener_that_keeps_a_kibibyte_of_each_input_is_found(monkeypatch):
    kept, accept = [], Door._accept
    monkeypatch.setattr(Door, "_accept", lambda *arguments: kept.append(bytes(1024)) or accept(*arguments))
    monkeypatch.setattr(fuzz, "SETTLE_S", 0.5)  # what is kept is never given back
    outcome = fuzz.fuzz("handshake", 1000)
    assert not outcome.good and 900 << 10 <= outcome.held_bytes < 1000 << 10, outcome
