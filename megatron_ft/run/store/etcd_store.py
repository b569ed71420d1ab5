"""The control store on etcd: the same port, without a single point of failure. Any minority of its nodes may die.

Failures it assumes: those of :mod:`.etcd_http`. etcd forgets nothing; if its data is deleted by hand, the run's marker
tells.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_ft.config.store_address import EtcdAddress
from megatron_ft.run.store.base import Verify, decode, encode
from megatron_ft.run.store.etcd_access import Access
from megatron_ft.run.store.etcd_http import Gateway, Verifier, decoded, encoded
from megatron_ft.run.store.etcd_torch_store import TorchEtcdStore

_DELETE_AT_ONCE = 100
"""etcd takes 128 operations in one transaction unless it is told otherwise."""


class EtcdStore:
    """The port over etcd's transactions and watches. ``timeout_s`` bounds the silence of all nodes together."""

    def __init__(
        self, address: EtcdAddress, timeout_s: float, verify: Verify | None = None, access: Access | None = None
    ) -> None:
        self._access, self._verify = access or Access(address), verify
        verified: Verifier | None = None
        if verify is not None:
            verified = lambda post: verify(lambda key: _value(post("/v3/kv/range", {"key": encoded(key)})))  # noqa: E731
        self._gateway = Gateway(address.endpoints, timeout_s, verified, self._access)
        self._torch: TorchEtcdStore | None = None
        self.name = self._gateway.name

    def set(self, key: str, value: str) -> None:
        self._gateway.call("/v3/kv/put", {"key": encoded(key), "value": encoded(value)})

    def get(self, key: str) -> str | None:
        return self._read(key)[0]

    def create(self, key: str, value: str) -> str:
        return self.swap(key, None, value) or ""

    def add(self, collection: str, member: str, value: str) -> None:
        self.set(f"{collection}/{member}", value)

    def members(self, collection: str) -> list[tuple[str, str]]:
        prefix = f"{collection}/"
        # "0" comes after "/": the range ends where the prefix does.
        answer = self._gateway.call("/v3/kv/range", {"key": encoded(prefix), "range_end": encoded(f"{collection}0")})
        found = ((decoded(entry["key"]), decoded(entry.get("value", ""))) for entry in answer.get("kvs", ()))
        return [(decode(key).removeprefix(prefix), decode(value)) for key, value in found]

    def swap(self, key: str, old: str | None, new: str) -> str | None:
        name = encoded(key)
        known: dict[str, str] = {"target": "CREATE", "create_revision": "0"}
        if old is not None:
            known = {"target": "VALUE", "value": encoded(encode(old))}
        answer = self._gateway.call(
            "/v3/kv/txn",
            {
                "compare": [{"key": name, **known}],
                "success": [{"request_put": {"key": name, "value": encoded(new)}}],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        return new if answer.get("succeeded") else _value(answer["responses"][0]["response_range"])

    def keys(self, prefix: str) -> list[str]:
        end = prefix[:-1] + chr(
            ord(prefix[-1]) + 1
        )  # of the range of all keys that begin with the prefix, which is ASCII
        body = {"key": encoded(prefix), "range_end": encoded(end), "keys_only": True}
        return [decode(decoded(entry["key"])) for entry in self._gateway.call("/v3/kv/range", body).get("kvs", ())]

    def delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _DELETE_AT_ONCE):
            some = keys[first : first + _DELETE_AT_ONCE]
            gone = [{"request_delete_range": {"key": encoded(key)}} for key in some]
            self._gateway.call("/v3/kv/txn", {"success": gone})

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Wait for the value. A frozen node keeps a watch open and silent, so a watch is no longer than a call."""
        deadline = time.monotonic() + timeout_s
        while True:
            value, revision = self._read(key)
            left_s = deadline - time.monotonic()
            if value is not None or left_s <= 0:
                return value
            written = self._gateway.watch(key, revision + 1, min(left_s, self._gateway.timeout_s))
            if written and (value := self._read(key)[0]) is None:
                return None  # it has been deleted since

    def rendezvous(self, prefix: str) -> Any:
        """Return a torch store. All of a client share a connection: each epoch has a store, which is never given back."""
        if self._torch is None:
            self._torch = TorchEtcdStore(self._gateway.clone())
        return dist.PrefixStore(prefix, self._torch)

    def clone(self) -> EtcdStore:
        return EtcdStore(self._access.address, self._gateway.timeout_s, self._verify, self._access)

    def close(self) -> None:
        self._gateway.close()

    def cut(self) -> None:
        """Do nothing: a thread that waits in Python does not hinder the process's end."""

    def _read(self, key: str) -> tuple[str | None, int]:
        """Return the value, and the store's revision when it was read."""
        answer = self._gateway.call("/v3/kv/range", {"key": encoded(key)})
        return _value(answer), int(answer["header"]["revision"])


def _value(answer: dict[str, Any]) -> str | None:
    """Return the value in the answer to a request for one key, if it is there."""
    kvs = answer.get("kvs")
    return decode(decoded(kvs[0].get("value", ""))) if kvs else None
