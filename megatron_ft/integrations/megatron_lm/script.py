"""Run a script of Megatron-LM unchanged, as a rank: ``-m megatron_ft.integrations.megatron_lm.script SCRIPT
ARGUMENTS``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megatron_ft.integrations.megatron_lm import loop


def main() -> None:
    """Run the script that the first argument names, as ``python SCRIPT ARGUMENTS`` does."""
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with loop.installed():
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
