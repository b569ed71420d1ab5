"""Addresses of this host, and the notation HOST:PORT. It does not import torch, because the doctor runs without it."""

from __future__ import annotations

import ipaddress
import socket

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
        family, kind, _, _, target = socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(
            f"--store: there is no route to {store_host} from this host ({error}); check the address"
        ) from None


def own_address(target: str | None) -> str:
    """Return the address from which this host reaches ``target``, or without one the address of its name."""
    if target is not None:
        return local_address(target)
    name = socket.gethostname()
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        raise LaunchError(
            f"this host's name {name} has no address ({error}); give --address, the address by which the other hosts reach "
            f"this host"
        ) from None


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
