"""The control store on etcd: the same port, without a single point of failure. Any minority of its nodes may die.

Failures it assumes: those of :mod:`.gateway`. etcd forgets nothing; if its data is deleted by hand, the run's marker tells.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from megatron_ft.runtime.store.gateway import Endpoints, Gateway, Verifier, decoded, encoded
from megatron_ft.runtime.store.port import Verify
from megatron_ft.runtime.store.torch_etcd import TorchEtcdStore


class EtcdStore:
    """The port over etcd's transactions, watches and leases. ``timeout_s`` bounds the silence of all nodes together.
    ``learns``: whether its nodes may be replaced by others (:class:`.gateway.Gateway`)."""

    def __init__(
        self, endpoints: Endpoints, timeout_s: float, verify: Verify | None = None, learns: bool = False
    ) -> None:
        self._endpoints, self._verify = endpoints, verify
        self._gateway = Gateway(endpoints, timeout_s, _verifier(verify), learns)
        self._torch: TorchEtcdStore | None = None
        self._leases: dict[str, str] = {}
        self.name = self._gateway.name

    def set(self, key: str, value: str) -> None:
        self._gateway.call("/v3/kv/put", {"key": encoded(key), "value": encoded(value)})

    def get(self, key: str) -> str | None:
        return self._look(key)[0]

    def create(self, key: str, value: str) -> str:
        name = encoded(key)
        answer = self._gateway.call(
            "/v3/kv/txn",
            {
                "compare": [{"key": name, "target": "CREATE", "create_revision": "0"}],
                "success": [{"request_put": {"key": name, "value": encoded(value)}}],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        if answer.get("succeeded"):
            return value
        return decoded(answer["responses"][0]["response_range"]["kvs"][0]["value"]).decode()

    def add(self, collection: str, member: str, value: str) -> None:
        self.set(f"{collection}/{member}", value)

    def members(self, collection: str) -> dict[str, str]:
        prefix = f"{collection}/"
        # "0" comes after "/": the range ends where the prefix does.
        answer = self._gateway.call("/v3/kv/range", {"key": encoded(prefix), "range_end": encoded(f"{collection}0")})
        found = ((decoded(entry["key"]), decoded(entry.get("value", ""))) for entry in answer.get("kvs", ()))
        return {key.decode().removeprefix(prefix): value.decode() for key, value in found}

    def wait(self, key: str, timeout_s: float) -> str | None:
        """A frozen node keeps a watch open and silent, so no watch is trusted for longer than a call may take."""
        deadline = time.monotonic() + timeout_s
        while True:
            value, revision = self._look(key)
            left_s = deadline - time.monotonic()
            if value is not None or left_s <= 0:
                return value
            self._gateway.watch(key, revision + 1, min(left_s, self._gateway.timeout_s))

    def beat(self, key: str, ttl_s: float) -> None:
        """A lease: the key is gone ``ttl_s`` (in whole seconds, etcd's least is 2) after the last beat."""
        lease = self._leases.get(key)
        if lease is not None:
            answer = self._gateway.call("/v3/lease/keepalive", {"ID": lease})
            if int(answer.get("result", {}).get("TTL", 0)) > 0:
                return
        lease = self._gateway.call("/v3/lease/grant", {"TTL": str(max(1, round(ttl_s)))})["ID"]
        self._gateway.call("/v3/kv/put", {"key": encoded(key), "value": encoded(lease), "lease": lease})
        self._leases[key] = lease

    def beating(self, key: str) -> bool:
        return self.get(key) is not None

    def rendezvous(self, prefix: str) -> Any:
        """All of one client share one connection: there is one per epoch, and they are never given back."""
        if self._torch is None:
            self._torch = TorchEtcdStore(self._gateway.clone())
        return dist.PrefixStore(prefix, self._torch)

    def clone(self) -> EtcdStore:
        return EtcdStore(self._endpoints, self._gateway.timeout_s, self._verify, self._gateway.learns)

    def close(self) -> None:
        self._gateway.close()

    def cut(self) -> None:
        """A thread that waits in Python hurts nobody."""

    def _look(self, key: str) -> tuple[str | None, int]:
        """The value, and the store's revision when it was read."""
        answer = self._gateway.call("/v3/kv/range", {"key": encoded(key)})
        kvs = answer.get("kvs")
        return decoded(kvs[0].get("value", "")).decode() if kvs else None, int(answer["header"]["revision"])


def _verifier(verify: Verify | None) -> Verifier | None:
    if verify is None:
        return None

    def verified(post: Any) -> None:
        def get(key: str) -> str | None:
            kvs = post("/v3/kv/range", {"key": encoded(key)}).get("kvs")
            return decoded(kvs[0]["value"]).decode() if kvs else None

        verify(get)

    return verified
