"""Addresses of this host, and how HOST:PORT is written. No torch here: the doctor asks, too, where there may be none."""

from __future__ import annotations

import ipaddress
import socket

from megatron_ft.errors import LaunchError


def split(text: str) -> tuple[str, int] | None:
    """``HOST:PORT``, ``[ADDRESS]:PORT`` where the address is IPv6's; None where it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or not host.strip("[]") or not port.isdigit() or not port.isascii() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(store_host: str) -> str:
    """The address of this host on its way to the store; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(f"--store: there is no way to {store_host} from here ({error}); check the address") from None


def own_address(target: str | None) -> str:
    """Of this host on its way to ``target``, else the one its name stands for."""
    if target is not None:
        return local_address(target)
    name = socket.gethostname()
    try:
        return socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        raise LaunchError(
            f"this host's own name, {name}, stands for no address ({error}); give --address, the one by which the other "
            f"hosts reach it"
        ) from None


def of(name: str) -> list[str]:
    """What the name stands for here, nothing if nothing is known."""
    try:
        return list(dict.fromkeys(info[4][0] for info in socket.getaddrinfo(name, None)))
    except OSError:
        return []


def own(name: str) -> str | None:
    """The first address of this machine that the name stands for, other than those by which every machine reaches itself."""
    return next((address for address in of(name) if not is_loopback(address) and binds(address)), None)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def binds(address: str) -> bool:
    """Whether it is one of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
