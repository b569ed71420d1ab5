"""The cores of a machine are shared by all ranks on it, whichever agents and runs they belong to.

An agent gives each of its ranks a share of the cores that it may use itself, and does not know of other agents on the
machine: several hosts of a test, or two jobs on one node. A rank looks for them when all ranks of its run have started.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch

from megatron_ft.utils import cores
from megatron_ft.worker import progress_counters

_log = logging.getLogger(__name__)

_RANK = re.compile(r"g(\d+)(?:\.\d+)?\.p(\d+)")


def take() -> None:
    """Use no more threads than this rank's share of the cores, if they are shared with other agents."""
    if progress_counters.SHARES_CORES not in os.environ:
        return
    agents = progress_counters.places()
    if len(agents) < 2:
        return
    ranks = sum(map(ranks_of, agents))
    threads = max(1, cores.usable() // max(1, ranks))
    if threads < torch.get_num_threads():
        _log.info(f"{len(agents)} agents share the cores of this machine: {threads} of them for each of {ranks} ranks")
        torch.set_num_threads(threads)


def ranks_of(place: Path) -> int:
    """Return the number of ranks that have started in an agent's directory of pulses, restarts not counted."""
    found = (_RANK.fullmatch(file.name) for file in place.iterdir())
    return len({(match[1], match[2]) for match in found if match})
