"""Addresses of this host, and the notation HOST:PORT. It does not import torch, because the doctor runs without it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.errors import LaunchError


def split(text: str) -> tuple[str, int] | None:
    """Return host and port of ``HOST:PORT``, or of ``[ADDRESS]:PORT`` for IPv6; None for another text."""
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]") or not port.isdigit() or not port.isascii() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """Inverse of :func:`split`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(store_host: str) -> str:
    """Return the address from which this host reaches ``store_host``. Nothing is sent. Raises ``LaunchError``."""
    try:
        return _towards(store_host)
    except OSError as error:
        raise LaunchError(
            f"--store: there is no route to {store_host} from this host ({error}); check the address, or give --store "
            f"HOST:PORT"
        ) from None


def _towards(host: str) -> str:
    """Return the address from which this host reaches ``host``. Nothing is sent. Raises ``OSError``."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # no limit: it does not block: a datagram socket
        probe.connect(target)
        return str(probe.getsockname()[0])


def own_address(target: str | None) -> str:
    """Return the address by which other hosts reach this one: the one from which it reaches ``target``.

    Without a target it is that of this host's name, or the one on the way to the rest of the network: some systems give
    a host's own name a loopback address, by which no other host reaches it. A machine that has only loopback addresses
    gets one of these. Raises ``LaunchError`` where there is no such address, or a choice.
    """
    if target is not None:
        try:
            return _towards(target)
        except OSError as error:
            raise LaunchError(
                f"there is no route to {target}, another host, from this host ({error}); give --address, the address by "
                f"which the other hosts reach this host"
            ) from None
    name = socket.gethostname()
    found = own(name)
    if found is not None:
        return found
    for somewhere in _FAR:
        with contextlib.suppress(OSError):
            if not is_loopback(found := _towards(somewhere)):
                return found
    there = interface_addresses()
    if len(there) > 1:
        raise LaunchError(
            f"this host's name {name} resolves to {', '.join(of(name)) or 'no address'}, and the host has "
            f"{', '.join(there)}; give --address, the address by which the other hosts reach this host"
        )
    return there[0] if there else loopback()


_FAR = ("198.51.100.1", "2001:db8::1")
"""Addresses that are assigned to no host: the way to them is that to the rest of the network."""


def loopback() -> str:
    """Return the address by which this machine reaches itself. Raises ``LaunchError`` if its loopback is down."""
    found = next(filter(binds, ("127.0.0.1", "::1")), None)
    if found is None:
        raise LaunchError(
            "this machine has neither 127.0.0.1 nor ::1; run `ip link set lo up`, or give --address, another address of it"
        )
    return found


def interface_addresses() -> list[str]:
    """Return the addresses of this host's interfaces that other hosts can reach: those of IPv4, or else of IPv6."""
    found = dict.fromkeys(each for _, name in socket.if_nameindex() for each in addresses_of(name))
    reached = [each for each in found if not (is_loopback(each) or _needs_interface(each))]
    return [each for each in reached if ":" not in each] or reached


def _needs_interface(address: str) -> bool:
    """Return whether ``address`` is one of IPv6 that is valid on the networks of one interface or site only."""
    found = ipaddress.ip_address(address)
    return found.version == 6 and (found.is_link_local or found.is_site_local)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address, or None."""
    address = address.partition("%")[0]
    if address == "::1" or address.startswith("127."):
        return "lo"
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)


def addresses_of(interface: str) -> list[str]:
    """Return the first IPv4 address of an interface, and all its IPv6 addresses."""
    found = []
    # An interface may have no IPv4 address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


_SIOCGIFADDR = 0x8915


def address_for(store_host: str, rank: int, target: str | None = None) -> str:
    """Return the address of this host, number ``rank``, for the other hosts of a run that meets at ``store_host``.

    Host 0 listens there. Where its own name stands for a loopback address, as in ``127.0.1.1 NAME`` of ``/etc/hosts``,
    it listens at the address of :func:`own_address`. Raises ``LaunchError`` on another host whose ``store_host`` is an
    address of loopback, unless it was written as one: then all hosts are on this machine.
    """
    found = local_address(store_host)
    if not is_loopback(found) or names_this_machine(store_host):
        return found
    if rank:
        raise LaunchError(
            f"--store: this host resolves {store_host}, the name of host 0, to {', '.join(of(store_host))}, which is this "
            f"host itself; correct its /etc/hosts, or give --store with the address of host 0"
        )
    return own_address(target)


def names_this_machine(host: str) -> bool:
    """Return whether ``host`` was written as an address of loopback: all hosts of the run are to be on this machine."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def of(name: str) -> list[str]:
    """Return the addresses of a host name, none if it cannot be resolved."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None)))
    except OSError:
        return []


def own(name: str) -> str | None:
    """Return the first address of ``name`` that belongs to this machine and is no loopback address, or None."""
    return next((address for address in of(name) if not is_loopback(address) and binds(address)), None)


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is one by which every machine reaches itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def binds(address: str) -> bool:
    """Return whether ``address`` belongs to this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def distinct_names(host_records: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return the name of each host; with its address where several hosts, such as containers, have the same name."""
    count = Counter(host_record["name"] for host_record in host_records.values())
    return {
        rank: host_record["name"]
        if count[host_record["name"]] == 1
        else f"{host_record['name']}({host_record['address']})"
        for rank, host_record in host_records.items()
    }
