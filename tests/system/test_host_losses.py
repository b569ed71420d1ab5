"""A part of the table of docs/host-losses.md, with shorter faults; ``make host-losses`` plays all of it."""

from __future__ import annotations

import pytest

from tests import host_losses, netlab
from tests.host_losses import Case
from tests.stores import etcd_missing

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())]

CASES = [
    Case(hosts=4, lost=0, blow="double", store="embedded"),
    Case(hosts=4, lost=0, blow="cut", store="embedded", across=True),
    Case(hosts=3, lost=0, blow="freeze", store="given"),
]


@pytest.fixture(scope="module")
def play():
    netlab.require()
    with host_losses.bench() as play:
        yield play


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_when_this_host_is_lost(play, case, monkeypatch):
    monkeypatch.setattr(host_losses, "FREEZE_S", 8.0)
    wrong = play(case).wrong
    assert not wrong, "\n".join(wrong)
