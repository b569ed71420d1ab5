"""Whether gloo and NCCL would use the network interface that leads to the other hosts.

Both take the names of interfaces from the environment: gloo a list of whole names, NCCL a list of beginnings of names
(``=`` before it: whole names; ``^``: all others). Without them a run tells gloo by itself; NCCL takes the first it finds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ft.doctor.local import BROKEN, OK, WARN, Finding
from megatron_ft.runtime import sockets

GLOO, NCCL, CARDS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"
_UP = 1  # IFF_UP of <net/if.h>
_CLASS = Path("/sys/class/net")
_CARDS = Path("/sys/class/infiniband")
_CHECK = "interface"


def examine(address: str, nccl: bool, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """``address``: by which the others reach this host. ``nccl``: whether a run here would use it."""
    right = sockets.interface_of(address)
    if right is None:
        return [Finding(_CHECK, WARN, f"no interface here has the address {address}", "give --address, if it is wrong")]
    there = {name: sockets.addresses_of(name) for _, name in socket.if_nameindex()}
    found = [
        *_gloo(environ.get(GLOO, ""), right, there),
        *_nccl(environ.get(NCCL, ""), right, there, nccl),
        *_cards(environ.get(CARDS, ""), nccl),
    ]
    return found or [Finding(_CHECK, OK, f"{right} leads to the others")]


def _gloo(setting: str, right: str, there: Mapping[str, Sequence[str]]) -> list[Finding]:
    names = [name for name in setting.split(",") if name]
    if not names:
        return []
    remedy = f"{GLOO}={right}, or leave it out: a run finds it by itself"
    bad = next((why for name in names if (why := _unusable(name, right, there))), "")
    if bad:
        return [Finding(_CHECK, BROKEN, f"{GLOO}={setting}: {bad}", remedy, needed=True)]
    return [] if right in names else [_another(GLOO, setting, right)]


def _nccl(setting: str, right: str, there: Mapping[str, Sequence[str]], used: bool) -> list[Finding]:
    if not setting:
        others = [name for name in there if name != right and _is_up(name) and _leads_somewhere(name, there[name])]
        if not others or right == "lo":
            return []
        text = f"{', '.join(sorted([right, *others]))} are up, {NCCL} is not set, and NCCL may take any of them"
        return [Finding(_CHECK, WARN, text, f"{NCCL}={right}, which leads to the other hosts")]
    names = matching(setting, sorted(there))
    usable = [name for name in names if not _unusable(name, right, there)]
    if not usable:
        why = _unusable(names[0], right, there) if names else f"it means no interface here; there are {_list(there)}"
        return [Finding(_CHECK, BROKEN if used else WARN, f"{NCCL}={setting}: {why}", f"{NCCL}={right}", needed=used)]
    return [] if right in usable else [_another(NCCL, setting, right)]


def _cards(setting: str, used: bool) -> list[Finding]:
    if not setting:
        return []
    there = sorted(os.listdir(_CARDS)) if _CARDS.is_dir() else []
    if matching(setting, there):
        return []
    text = f"{CARDS}={setting}: no InfiniBand card here is meant by that; there are {_list(there) or 'none'}"
    return [Finding(_CHECK, BROKEN if used else WARN, text, f"correct {CARDS}, or leave it out", needed=used)]


def matching(setting: str, there: Sequence[str]) -> list[str]:
    """What NCCL understands by such a setting. A card's port (``mlx5_0:1``) is not looked at."""
    others, whole = setting.startswith("^"), setting.lstrip("^").startswith("=")
    words = [word.partition(":")[0] for word in setting.lstrip("^=").split(",") if word]
    meant = [name for name in there if any(name == word if whole else name.startswith(word) for word in words)]
    if others:
        return [name for name in there if name not in meant and name != "lo"]
    return meant


def _unusable(name: str, right: str, there: Mapping[str, Sequence[str]]) -> str:
    """Why no other host can be reached through it; empty if some may."""
    if name not in there:
        return f"this host has no {name}; it has {_list(there)}"
    if not _is_up(name):
        return f"{name} is down"
    if name == "lo" and right != "lo":
        return "lo leads to no other host"
    return "" if there[name] else f"{name} has no address"


def _another(variable: str, setting: str, right: str) -> Finding:
    text = f"{variable}={setting}, and it is {right} that leads to the other hosts"
    return Finding(_CHECK, WARN, text, f"{variable}={right}, unless they have another network for this")


def _leads_somewhere(name: str, addresses: Sequence[str]) -> bool:
    """Whether it is not loopback and has an address that is not only good for its own wire."""
    return name != "lo" and any(not address.startswith("fe80:") for address in addresses)


def _is_up(name: str) -> bool:
    """Switched on, and nothing known against it: a cable that is out makes it ``down``."""
    try:
        flags = int((_CLASS / name / "flags").read_text(), 16)
        return bool(flags & _UP) and (_CLASS / name / "operstate").read_text().strip() != "down"
    except (OSError, ValueError):
        return True  # a system that does not say


def _list(names: Mapping[str, Sequence[str]] | Sequence[str]) -> str:
    return ", ".join(sorted(names))
