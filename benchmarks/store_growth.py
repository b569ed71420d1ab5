"""The size of the control store over many view changes, in an embedded store and in an etcd of three nodes.

    python benchmarks/store_growth.py [--changes 2000]        (needs etcd for the second part)

Stand-ins for two groups make the view changes of a run in which group 1 is lost and comes back again and again, through
the real client, with a sweep after each (``tests/growth.py``). Counted every 100 changes: keys of the run, and the bytes
of their names and values. For etcd also ``dbSizeInUse`` of a node after a compaction, and its file. Writes
results/store_growth.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.ROOT))
from megatron_ft.run import store
from tests.growth import Changes
from tests.stores import EtcdCluster, etcd_missing

EVERY, FIRST = 100, 20


def main() -> None:
    common.give_secret()
    parser = argparse.ArgumentParser()
    parser.add_argument("--changes", type=int, default=2000)
    options = parser.parse_args()
    server, port = store.host("127.0.0.1", 0)
    found = {"embedded": measure(store.ControlStore(("127.0.0.1", port), "run", 30.0), options.changes)}
    del server
    if not etcd_missing():
        with tempfile.TemporaryDirectory() as directory:
            cluster = EtcdCluster(Path(directory))
            cluster.start()
            try:
                found["etcd"] = measure(store.ControlStore(cluster.address, "run", 30.0), options.changes)
            finally:
                cluster.close()
    summary = {
        name: {key: {"after_20": rows[0][key], "at_the_end": rows[-1][key]} for key in rows[0] if key != "changes"}
        for name, rows in ((name, part["sizes"]) for name, part in found.items())
    }
    print(common.save("store_growth", {"summary": summary, **found}))


def measure(client: store.ControlStore, total: int) -> dict[str, Any]:
    changes, rows, began = Changes(client), [], time.monotonic()
    for count in [FIRST, *range(EVERY, total + 1, EVERY)]:
        changes.make(count - (rows[-1]["changes"] if rows else 0))
        keys, size = changes.size()
        rows.append({"changes": count, "keys": keys, "bytes": size, **_database(client)})
        print(rows[-1], flush=True)
    return {"seconds": round(time.monotonic() - began, 1), "sizes": rows}


def _database(client: store.ControlStore) -> dict[str, int]:
    """Return the database size of the etcd node that the client talks to; empty for an embedded store."""
    gateway = getattr(client._client, "_gateway", None)
    if gateway is None:
        return {}
    revision = gateway.call("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
    gateway.call("/v3/kv/compaction", {"revision": revision, "physical": True})
    status = gateway.call("/v3/maintenance/status", {})
    return {"db_in_use": int(status["dbSizeInUse"]), "db_file": int(status["dbSize"])}


if __name__ == "__main__":
    main()
