"""The control store, through which groups and agents agree. Use: :mod:`.run_store`; failures: :mod:`.base`."""

from megatron_ft.run.store.base import AWAY, StoreConflict, StoreGone, StoreLostMemory, StoreSilent, patient
from megatron_ft.run.store.claim_log import Fenced, Locator, Log, LogAway
from megatron_ft.run.store.run_store import NOTICES, Address, ControlStore
from megatron_ft.run.store.tcp_store import host, listen, serve_on

__all__ = [
    "AWAY",
    "NOTICES",
    "Address",
    "ControlStore",
    "Fenced",
    "Locator",
    "Log",
    "LogAway",
    "StoreConflict",
    "StoreGone",
    "StoreLostMemory",
    "StoreSilent",
    "host",
    "listen",
    "patient",
    "serve_on",
]
