"""Which communicator joins the members of a view: what each of them offers, and what all of them take.

Each member says what it can (:class:`Offer`) when it is ready to connect. All see the same offers, so all choose alike, and
a view is never divided between two kinds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.config.schema import AUTO, COMMUNICATORS
from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives.base import Communicator
from megatron_ft.run.collectives.cuda_nccl import CudaNccl
from megatron_ft.run.collectives.gloo_communicator import GlooCommunicator
from megatron_ft.run.collectives.nccl_communicator import MULTI_RANK_ENABLE, MULTI_RANK_NCCL, NcclCommunicator
from megatron_ft.run.collectives.two_level_communicator import TwoLevelCommunicator

KINDS = NCCL, GLOO = COMMUNICATORS


@dataclass(frozen=True)
class Offer:
    """What one member can use.

    Attributes:
        kinds: of communicators.
        place: names the device; "" for a CPU, and where NCCL may have several ranks on one. Otherwise NCCL refuses a
            communicator two of whose ranks are on one device.
        host: its address; members that share one share its network. "" if gloo has to take tensors from a device.
    """

    kinds: tuple[str, ...]
    place: str = ""
    host: str = ""

    @classmethod
    def of(cls, setting: str, device: torch.device, host: str) -> Offer:
        """Return the offer of a rank whose gradients are on ``device``; ``setting``: ``fault_tolerance.communicator``.

        Raises ``ConfigError`` if the setting asks for what the device or this torch cannot do.
        """
        cuda = device.type == "cuda"
        able = (NCCL, GLOO) if cuda and dist.is_nccl_available() else (GLOO,)
        if setting not in (AUTO, *able):
            raise ConfigError(
                f'fault_tolerance.communicator is "{setting}", and the gradients of this rank are on {device} with '
                f"torch {torch.__version__}, which can use {' and '.join(able)}; set it to one of them or to "
                f'"{AUTO}", or move the model to a GPU before session.wrap'
            )
        alone = cuda and not (os.environ.get(MULTI_RANK_ENABLE) == "1" and torch.cuda.nccl.version() >= MULTI_RANK_NCCL)
        place = str(torch.cuda.get_device_properties(device).uuid) if alone else ""
        return cls(able if setting == AUTO else (setting,), place, "" if cuda else host)


@dataclass(frozen=True)
class Choice:
    """The communicator that all members take: its ``kind``, and the members of each host. ``hosts`` is empty where sums must
    not be made by hosts."""

    kind: str
    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kind: str, host_of: Mapping[int, Any]) -> Choice:
        """``host_of``: the host of each member."""
        hosts: dict[Any, list[int]] = {}
        for member, host in sorted(host_of.items()):
            hosts.setdefault(host, []).append(member)
        return cls(kind, tuple(map(tuple, hosts.values())))


def agree(offers: Mapping[int, Offer]) -> Choice:
    """Return what all members take, the same at each of them. ``offers``: by member.

    Raises ``ConfigError`` if there is none.
    """
    places = [offer.place for offer in offers.values() if offer.place]
    together = len(places) > len(set(places))
    for kind in KINDS:
        if all(kind in offer.kinds for offer in offers.values()) and not (kind == NCCL and together):
            hosts = {member: offer.host for member, offer in offers.items()}
            return Choice.of(kind, hosts if all(hosts.values()) else {})
    said = ", ".join(f"group {group}: {' or '.join(offer.kinds)}" for group, offer in sorted(offers.items()))
    why = (
        f"several of them are on one GPU, which NCCL refuses without {MULTI_RANK_ENABLE}=1"
        if together
        else "they have none in common"
    )
    raise ConfigError(
        f"the groups cannot communicate ({said}): {why}; use the same model placement in all groups and "
        f'fault_tolerance.communicator "{AUTO}"'
    )


@dataclass(frozen=True)
class Maker:
    """Makes a communicator of one member; see :class:`~megatron_ft.run.collectives.base.Communicator` for the fields."""

    me: int
    members: Sequence[int]
    epoch: int
    timeout_s: float
    address: str
    device: torch.device = torch.device("cpu")
    rounded: bool = False
    """True if gradients are sent as bf16."""

    def make(self, choice: Choice, name: str, rendezvous: Callable[[str], Any]) -> Communicator:
        """Return a communicator that is not connected. ``rendezvous`` returns the torch store of a name; no other
        communicator has this ``name``."""
        rest = (self.epoch, self.timeout_s, self.address)
        host: Communicator = GlooCommunicator(rendezvous(name), self.me, self.members, *rest)
        if choice.kind == NCCL:  # it knows itself which of its ranks share a host
            return with_nccl(host, self.device, name, rendezvous(f"{name}/{NCCL}"))
        if choice.hosts and len(self.members) > 1 and (self.rounded or 1 < len(choice.hosts) < len(self.members)):

            def part(step: str, members: Sequence[int]) -> GlooCommunicator:
                return GlooCommunicator(rendezvous(f"{name}/{step}"), self.me, members, *rest)

            return TwoLevelCommunicator(host, choice.hosts, part, rounded=self.rounded)
        return host


def with_nccl(host: Communicator, device: torch.device, name: str, rendezvous: Any) -> Communicator:
    """Return a communicator, not connected, that sums tensors on ``device`` by NCCL and all others by ``host``."""
    return NcclCommunicator(host, CudaNccl(device, name), lambda tensor: tensor.device == device, rendezvous)
