"""The control store: what groups and agents agree through. Use: :mod:`.control`; failures: :mod:`.port`."""

from megatron_ft.runtime.store.control import NOTICES, OWN_ETCD, Address, ControlStore
from megatron_ft.runtime.store.port import (
    AWAY,
    StoreConflict,
    StoreGone,
    StoreLostMemory,
    StoreSilent,
    patient,
)
from megatron_ft.runtime.store.tcp import host, listen, serve_on

__all__ = [
    "AWAY",
    "NOTICES",
    "OWN_ETCD",
    "Address",
    "ControlStore",
    "StoreConflict",
    "StoreGone",
    "StoreLostMemory",
    "StoreSilent",
    "host",
    "listen",
    "patient",
    "serve_on",
]
