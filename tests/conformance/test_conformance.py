"""Every engine keeps what ``tests.conformance.rank`` checks, with as many ranks as its group has."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest
import torch.distributed as dist

from tests import support
from tests.conformance.kits import KITS
from tests.conformance.rank import CHECKS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank of a kit has found; a kit is played once."""

    @cache
    def play(name: str) -> list[dict[str, str | None]]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outs = [tmp_path_factory.mktemp("kit") / "found.json" for _ in range(KITS[name].ranks)]
        ranks = []
        for rank, out in enumerate(outs):
            words = [sys.executable, "-m", "tests.conformance.rank", name, str(rank), str(store.port), str(out)]
            ranks.append(
                subprocess.Popen(words, cwd=support.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        said = [rank.communicate(timeout=support.TIMEOUT_S)[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), "\n".join(said)
        return [json.loads(out.read_text()) for out in outs]

    return play


OFTEN = (
    "torch-native",
    "fsdp 2",
    "tp 2",
    "pp 2",
    "pp 2 interleaved",
    "deepspeed zero 2",
    "deepspeed zero 3",
    "deepspeed zero 1, fp16",
    "deepspeed pp 2",
    "megatron dp 2, distributed optimizer",
    "megatron pp 2, virtual stages",
)
"""The kits of ``make test``; ``make test-long`` plays the others, most of which have four ranks."""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", support.first_of({name: name for name in KITS}, *OFTEN))
def test_an_engine(found, name, check):
    support.needs_engine(name)
    errors = [f"rank {rank}: {one[check]}" for rank, one in enumerate(found(name)) if one[check]]
    assert not errors, "\n".join(errors)
