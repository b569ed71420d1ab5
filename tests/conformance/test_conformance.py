"""Every engine keeps what ``tests.conformance.rank`` checks, with as many ranks as its group has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests import support
from tests.conformance.kits import KITS
from tests.conformance.rank import CHECKS

OFTEN = ("torch-native", "fsdp 2", "pp 2")
"""The kits of ``make test``; ``make test-long`` plays the others. In ``test_engines``
every engine loses a rank."""


@pytest.mark.parametrize("name", support.first_of({name: name for name in KITS}, *OFTEN))
def test_an_engine(tmp_path, name):
    """All checks in one test: building the group takes longer than any of them."""
    support.needs_engine(name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(KITS[name].ranks):
        words = [sys.executable, "-m", "tests.conformance.rank", name, str(rank), str(store.port)]
        with (tmp_path / f"{rank}.log").open("wb") as log:
            out = [str(tmp_path / f"{rank}.json")]
            ranks.append(subprocess.Popen([*words, *out], cwd=support.ROOT, stdout=log, stderr=subprocess.STDOUT))
    codes = [rank.wait(2 * support.TIMEOUT_S) for rank in ranks]
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in sorted(tmp_path.glob("*.log")))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(ranks))]
    assert all(list(one) == list(CHECKS) for one in found)
    errors = [
        f"rank {rank}, {check}: {error}" for rank, one in enumerate(found) for check, error in one.items() if error
    ]
    assert not errors, "\n".join(errors)
