"""``megatron-ft replay``: compute a committed step of a run again, and compare it with the run's record.

One group computes all microbatches, from the newest checkpoint that is not after the step, or from the beginning. With
exact reduction the number of groups does not matter: losses, norms and digests must have the same bits, on hardware of
the same kind.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.config import rank_env
from megatron_ft.errors import ConfigError
from megatron_ft.proof import audit_run
from megatron_ft.proof.audit_run import Script
from megatron_ft.record import history, run_directory
from megatron_ft.types import Microbatch, host_name, listed
from megatron_ft.utils import shared_file

_OURS = ("policy", "standby", "redundancy", "placement", "failure_domains", "min_groups", "verify", "store", "rejoin")
"""Settings that only say who computes what."""
_SHOWN = 10
"""Number of steps that differ in a message."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft replay``."""
    parser.add_argument("run_dir", type=Path, help="of a run with reduction exact")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the committed step to compute again")
    parser.add_argument("--microbatch", metavar="SHARD.INDEX", help="compare the digest of this microbatch only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compute the step again, print what was compared, and return the exit code: 0 if all agrees. Raises ``FTError``."""
    from megatron_ft.run import checkpoint  # it imports torch, which the options do without

    run_dir, step = options.run_dir, options.step
    raw = _config(run_dir)
    asked = None if options.microbatch is None else _microbatch(options.microbatch, step)
    lines = [line for start in run_directory.starts_of(run_dir) for line in history.read(start)]
    steps = {line["step"]: line for line in lines if line["event"] == "step"}
    if step not in steps:
        raise ConfigError(
            f"{run_dir} has no step {step}; it has the steps {min(steps, default=0)} to {max(steps, default=0)}"
        )
    section = raw["fault_tolerance"]
    directory = section["checkpoint"]["directory"]
    found = [one for one in checkpoint.find(Path(directory)) if one.complete and one.step <= step] if directory else []
    with tempfile.TemporaryDirectory(prefix="megatron-ft-") as name:
        where = Path(name)
        saved = {"directory": str(where / "saved"), "period_s": 1e9, "keep": 1000} if found else {}
        if found:
            (where / "saved").mkdir()
            (where / "saved" / Path(found[0].path).name).symlink_to(Path(found[0].path).resolve())
        first = found[0].step if found else 0
        print(
            f"computing steps {first} to {step} again, from " + (found[0].path if found else "the beginning"),
            flush=True,
        )
        kept = {name: value for name, value in section.items() if name not in (*_OURS, "checkpoint")}
        again = {
            **raw["engine"],
            "train_micro_batch_size_per_gpu": raw["samples_per_microbatch"],
            "gradient_accumulation_steps": raw["microbatches_per_group"],
            "gradient_clipping": raw["gradient_clipping"],
            "fault_tolerance": {**kept, "rejoin": {"enabled": False}, "checkpoint": saved},
        }
        script = Script(raw["command"], Path(raw["directory"]))
        audit = rank_env.Audit(last=step, digests=step, shards=raw["shards"])
        code, mine = audit_run.play(script, again, where, groups=1, ranks=raw["ranks_per_group"], audit=audit)
    return _compare(run_dir, lines, mine, step, asked, code)


def _config(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.json"
    try:
        raw = json.loads(shared_file.read_record(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the --run-dir of a launch") from None
    if raw.get("fault_tolerance", {}).get("reduction") != "exact":
        raise ConfigError(
            f'{run_dir} is of a run with reduction "fast", whose sums depend on the groups that made them; only a run with '
            f'"exact" can be computed again to the bit'
        )
    return dict(raw)


def _microbatch(text: str, step: int) -> Microbatch:
    try:
        found = Microbatch.parse(text if "/" in text else f"{step}/{text}")
    except ValueError:
        raise ConfigError(f"--microbatch {text!r} is not SHARD.INDEX, such as 3.0") from None
    if found.step != step:
        raise ConfigError(f"--microbatch {text} is of step {found.step}, and --step is {step}; give SHARD.INDEX")
    return found


def _compare(
    run_dir: Path,
    lines: Sequence[Mapping[str, Any]],
    mine: Sequence[Mapping[str, Any]],
    step: int,
    asked: Microbatch | None,
    code: int,
) -> int:
    theirs = {line["step"]: line for line in lines if line["event"] == "step"}
    again = {line["step"]: line for line in mine if line["event"] == "step"}
    if step not in again:
        print(f"the run that computes it again ended with exit code {code} before step {step} was committed")
        return 1
    wrong = 0
    for name in ("loss", "gradient_norm"):
        differ = [one for one in sorted(again) if again[one].get(name) != theirs.get(one, {}).get(name)]
        wrong += len(differ)
        what = name.replace("_", " ")
        print(
            f"{what}: "
            + (f"differs in steps {listed(differ, _SHOWN)}" if differ else f"equal in all {len(again)} steps")
        )
    wrong += _compare_digests(run_dir, lines, mine, step, asked)
    ends = [line for line in lines if line["event"] == "end" and line["step"] == step]
    if ends:
        equal = next(line for line in mine if line["event"] == "end")["params_sha256"] == ends[-1]["params_sha256"]
        wrong += not equal
        print(f"parameters after step {step}: " + ("equal" if equal else "differ"))
    print(
        f"step {step}: "
        + (f"{wrong} comparisons differ" if wrong else "the record agrees with what was computed again")
    )
    return 1 if wrong else 0


def _compare_digests(
    run_dir: Path,
    lines: Sequence[Mapping[str, Any]],
    mine: Sequence[Mapping[str, Any]],
    step: int,
    asked: Microbatch | None,
) -> int:
    recorded = [line for line in lines if line["event"] == "verified" and line["step"] == step]
    computed = {
        name: digest
        for line in mine
        if line["event"] == "digests" and line["position"] == 0
        for name, digest in line["digests"].items()
    }
    said = recorded[-1]["digests"] if recorded else {}
    if asked is not None:
        said = {name: found for name, found in said.items() if name == str(asked)}
    if not said:
        print("digests: the run has recorded none" + (f" of {asked}" if asked else f" in step {step}"))
        return 0
    ranks, wrong = run_directory.read(run_dir / "ranks.json"), 0
    hosts = {one["group"]: f" on {host_name(one['host'])}" for one in ranks}
    for name, found in said.items():
        differ = [group for group, digest in found.items() if digest != computed.get(name)]
        wrong += len(differ)
        who = ", ".join(f"group {group}{hosts.get(int(group), '')}" for group in (differ or found))
        print(f"microbatch {name}: the digest of {who} " + ("is not that computed again" if differ else "agrees"))
    return wrong
