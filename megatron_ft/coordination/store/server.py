"""A store server as a process of its own: ``python -m megatron_ft.coordination.store.server --port N``.

It prints the port it listens on, and lives until its standard input ends, with the process that started it, or until a
signal. It can be started again on the same port; it comes back empty, and the run rebuilds it.
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_ft.coordination.store.tcp_store import host
from megatron_ft.errors import LaunchError


def main() -> int:
    """Serve until the process is killed; the port is printed."""
    parser = argparse.ArgumentParser(description="Serve the control store of a run.")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    options = parser.parse_args()
    try:
        server, port = host(options.bind, options.port)
    except LaunchError as error:
        print(f"megatron_ft: {error}", file=sys.stderr)
        return error.exit_code
    print(port, flush=True)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    del server
    return 0


if __name__ == "__main__":
    sys.exit(main())
