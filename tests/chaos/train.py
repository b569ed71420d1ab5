"""The example's training script, started in half the time: an optimizer imports ``torch._dynamo``, which nothing here uses.

Starting processes is most of what a chaos run takes.
"""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "pretrain_gpt" / "train.py"


def leave_out_dynamo() -> None:
    """Put a stand-in in place of ``torch._dynamo``: the functions that its decorators exempt from the compiler are not
    compiled anyway."""
    stand_in = types.ModuleType("torch._dynamo")

    def disable(function: Callable, recursive: bool = True, **_: object) -> Callable:
        return function

    stand_in.disable, stand_in.graph_break = disable, lambda *_: None
    sys.modules["torch._dynamo"] = stand_in


if __name__ == "__main__":
    leave_out_dynamo()
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
