"""Feed a real run's record through ``core`` again: ``python tools/replay.py RUN_DIR [--json]``.

Exit code 0: core decides the same. 1: a decision differs, and both are shown. 2: the record cannot be replayed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ft.errors import FTError
from megatron_ft.proof.replay import Decision, Replay, replay
from megatron_ft.record.protocol_trace import Record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="replay", description="Does core decide again what a run has recorded?")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what was --run-dir of the launch")
    parser.add_argument("--json", action="store_true", help="print the result for machines")
    options = parser.parse_args(arguments)
    try:
        record = Record.load(options.run_dir)
    except FTError as error:
        print(f"replay: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"same": None, "error": str(error)}))
        return 2
    result = replay(record)
    print(json.dumps(_for_machines(record, result), default=str) if options.json else _for_people(record, result))
    return 1 if result.different else 0


def _for_people(record: Record, result: Replay) -> str:
    told = [decision for decision in result.decisions if decision.kind != "step" or decision.differences]
    lines = [text for decision in told for text in _text(decision)]
    counts = ", ".join(f"{result.count(kind)} {kind} lines" for kind in ("view", "recovery", "step"))
    verdict = f"{len(result.different)} DIFFERENT" if result.different else "all the same"
    lines.append(f"decided again: {counts}: {verdict}")
    if result.stopped:
        lines.append(f"what comes later was not decided again: {result.stopped}")
    if not record.ended:
        lines.append("the run was cut off (no 'end' line); replayed as far as the record goes")
    if record.torn:
        lines.append(f"{record.torn} torn lines were skipped")
    return "\n".join(lines)


def _text(decision: Decision) -> list[str]:
    if not decision.differences:
        return [f"{decision.what}: same"]
    first = f"{decision.what}: DIFFERENT (history.jsonl line {decision.line})"
    return [first, *(f"  {d.name}: recorded {d.recorded}, core decides {d.decided}" for d in decision.differences)]


def _for_machines(record: Record, result: Replay) -> dict[str, Any]:
    return {
        "same": not result.different,
        "ended": record.ended,
        "stopped": result.stopped,
        "torn": record.torn,
        "decisions": [asdict(decision) for decision in result.decisions],
    }


if __name__ == "__main__":
    sys.exit(main())
