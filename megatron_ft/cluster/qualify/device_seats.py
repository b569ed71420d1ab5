"""Which device each group of a qualification gets, and whether NCCL can join them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.run.collectives.nccl_communicator import MULTI_RANK_ENABLE, MULTI_RANK_NCCL

MULTI_RANK = {MULTI_RANK_ENABLE: "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
"""For several ranks on one GPU: kernels of all of them have to fit on it at the same time."""
CPU = "cpu"


@dataclass(frozen=True)
class Seat:
    """The place of one group.

    Attributes:
        host: number of its host.
        device: torch's name of its device in its process.
        env: variables of its process.
    """

    host: int
    device: str = CPU
    env: Mapping[str, str] = field(default_factory=dict)


def usual_groups(gpus: Sequence[int]) -> int:
    """Return the number of groups without ``--groups``: one for each GPU where there are several, else three, and at
    least one for each host. ``gpus``: of each host."""
    return sum(gpus) if sum(gpus) > 1 and all(gpus) else max(3, len(gpus))


def seats(groups: int, hosts: Sequence[Mapping[str, Any]]) -> tuple[list[Seat], str]:
    """Return the place of each group, and why NCCL cannot join them, or "".

    Args:
        groups: their number; they are dealt to the hosts one by one.
        hosts: what ``device_facts`` says of each: ``gpus`` (a list), ``mig`` (names of slices), ``nccl`` (the version as
            three numbers, empty without).
    """
    own = [[group for group in range(groups) if group % len(hosts) == host] for host in range(len(hosts))]
    found: dict[int, Seat] = {}
    reasons = []
    for host, facts in enumerate(hosts):
        places, reason = _on_host(host, len(own[host]), facts)
        found |= dict(zip(own[host], places, strict=True))
        reasons += [reason] if reason else []
    return [found[group] for group in range(groups)], reasons[0] if reasons else ""


def _on_host(host: int, groups: int, facts: Mapping[str, Any]) -> tuple[list[Seat], str]:
    gpus, slices, nccl = len(facts["gpus"]), facts["mig"], tuple(facts["nccl"])
    if not gpus:
        return [Seat(host)] * groups, "no GPU"
    places = [Seat(host, f"cuda:{number % gpus}") for number in range(groups)]
    if not nccl:
        return places, "this torch was built without NCCL"
    if groups <= gpus:
        return places, ""
    if nccl[:2] >= MULTI_RANK_NCCL:
        return [Seat(host, place.device, MULTI_RANK) for place in places], ""
    if len(slices) >= groups:
        return [Seat(host, "cuda:0", {"CUDA_VISIBLE_DEVICES": name}) for name in slices[:groups]], ""
    least, version = ".".join(map(str, MULTI_RANK_NCCL)), ".".join(map(str, nccl))
    gpu = f"{gpus} GPU{'s' * (gpus > 1)}"
    return places, (
        f"{groups} groups share {gpu}, which NCCL {version} refuses: it takes NCCL {least} "
        f"({MULTI_RANK_ENABLE}), {groups} MIG slices (here: {len(slices)}) or more GPUs"
    )
