"""``megatron-ft doctor --deterministic``: does a script's model give the same gradients, bit for bit, in two processes?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from megatron_ft.config import rank_env, schema
from megatron_ft.errors import InvariantBroken
from megatron_ft.proof import audit_run
from megatron_ft.proof.audit_run import Script

_GROUPS, _STEPS = 2, 2
_MOST = 32
"""Largest number of microbatches of a step that are compared."""


def run(script: Script, config: Path | None) -> int:
    """Run two steps with two groups that compute all microbatches, and say whether their gradients are equal. Return the
    exit code. Raises ``FTError``."""
    raw = schema.read(config)
    run = schema.resolve(raw, groups=_GROUPS)
    count = min(run.microbatches, _MOST)
    section = {
        "reduction": "exact",
        "verify": {"microbatches_per_step": count},
        "policy": "stacked_quota",
        "rejoin": {"enabled": False},
        "seed": run.fault_tolerance.seed,
        "loss_reduction": run.fault_tolerance.loss_reduction,
        "model": dict(run.fault_tolerance.model),
    }
    with tempfile.TemporaryDirectory(prefix="megatron-ft-") as where:
        code, lines = audit_run.play(
            script,
            {**raw, "fault_tolerance": section},
            Path(where),
            groups=_GROUPS,
            ranks=None,
            audit=rank_env.Audit(last=_STEPS - 1),
        )
    return _tell(code, lines, count)


def _tell(code: int, lines: list[dict[str, Any]], count: int) -> int:
    differ = sorted(
        {one for line in lines if line["event"] == "discarded" for one in [*line["doubtful"], *line["guilty"].values()]}
        - {None}
    )
    stopped = next((line["reason"] for line in lines if line["event"] == "stop"), "")
    if differ:
        print(
            f"not deterministic: two processes computed the microbatches {', '.join(differ)} with other bits; "
            f"docs/exactness.md names what can be the cause"
        )
        return 1
    if code == InvariantBroken.exit_code or "differ" in stopped:
        print(f"not deterministic: {stopped}")
        return 1
    if code:
        print(f"the run ended with exit code {code}: {stopped}")
        return 1
    print(
        f"deterministic: two processes computed {count} microbatches in each of {_STEPS} steps, and their gradients are "
        f"equal, bit for bit"
    )
    return 0
