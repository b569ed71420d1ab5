"""A torch ``Store`` over etcd, so that process groups can be built without a TCPStore. torch calls it from C++.

Failures it assumes: those of :mod:`.etcd_http`. Errors are ``RuntimeError`` of torch's kinds, as its callers expect.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ft.errors import StoreError
from megatron_ft.run.store.etcd_http import Gateway, decoded, encoded

_KEPT: list[TorchEtcdStore] = []
_MOST_IN_TRANSACTION = 100
"""etcd's own limit (``--max-txn-ops``) is 128 by default."""


class TorchEtcdStore(dist.Store):
    """The part of a store that torch's process groups use; keys have the names in etcd that torch gives them."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        # C++ holds only the C++ half, and a call finds no Python half if that was collected. It is small; keep it.
        _KEPT.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._call("/v3/kv/put", {"key": encoded(key), "value": encoded(value)})

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._read(key)[0] or b""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # not in torch's stub
        deadline = time.monotonic() + limit_s
        for key in keys:
            while True:
                value, _, now = self._read(key)
                if value is not None:
                    break
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {key}")
                self._gateway.watch(key, now + 1, min(left_s, self._gateway.timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._read(key)[0] is not None for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Compare and set as torch does: an absent key equals an empty ``expected``; return what stands there now."""
        wanted, new = _bytes(expected), _bytes(desired)
        while True:
            value, revision, _ = self._read(key)
            if value is None and wanted:
                return wanted
            if value is not None and value != wanted:
                return value
            if self._replace(key, revision, new):
                return new

    def add(self, key: str, amount: int) -> int:
        """Add once, also when the answer was lost and the request is repeated: each call leaves its result."""
        call = f"{key}/add/{uuid.uuid4().hex}"
        while True:
            value, revision, _ = self._read(key)
            total = int(value or b"0") + amount
            if self._replace(key, revision, str(total).encode(), call):
                self.delete_key(call)
                return total
            done = self._read(call)[0]
            if done is not None:
                self.delete_key(call)
                return int(done)

    def delete_key(self, key: str) -> bool:
        return int(self._call("/v3/kv/deleterange", {"key": encoded(key)}).get("deleted", 0)) > 0

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return many values in one request; only keys that do not exist yet are waited for one by one."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), _MOST_IN_TRANSACTION):
            reads = [{"request_range": {"key": encoded(key)}} for key in keys[start : start + _MOST_IN_TRANSACTION]]
            answers = self._call("/v3/kv/txn", {"success": reads}).get("responses", ())
            kvs = [answer["response_range"].get("kvs") for answer in answers]
            found += [decoded(entries[0].get("value", "")) if entries else None for entries in kvs]
        return [self.get(key) if value is None else value for key, value in zip(keys, found, strict=True)]

    deleteKey = delete_key  # torch's C++ looks for this name

    def clone(self) -> TorchEtcdStore:
        return TorchEtcdStore(self._gateway)

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._gateway.call(path, body)
        except StoreError as error:
            raise dist.DistNetworkError(str(error)) from None

    def _read(self, key: str) -> tuple[bytes | None, int, int]:
        """Return (value, revision of its last change or 0, revision of the store)."""
        answer = self._call("/v3/kv/range", {"key": encoded(key)})
        now = int(answer["header"]["revision"])
        if not answer.get("kvs"):
            return None, 0, now
        found: dict[str, Any] = answer["kvs"][0]
        return decoded(found.get("value", "")), int(found["mod_revision"]), now

    def _replace(self, key: str, revision: int, value: bytes, call: str | None = None) -> bool:
        """Write if the key is unchanged since ``revision``; also write the proof that this call did, under ``call``."""
        puts = [{"request_put": {"key": encoded(name), "value": encoded(value)}} for name in (key, call) if name]
        unchanged = {"key": encoded(key), "target": "MOD", "mod_revision": str(revision)}
        return bool(self._call("/v3/kv/txn", {"compare": [unchanged], "success": puts}).get("succeeded"))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
