"""``python -m megatron_ft``: the command line ``megatron-ft``."""

from __future__ import annotations

from megatron_ft.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()
