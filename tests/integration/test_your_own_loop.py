"""The example that converts a script for DistributedDataParallel."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import subprocess
import sys

import pytest

from megatron_ft.faults import injection_points
from megatron_ft.faults.injection_points import Breakpoint
from tests import support, warm

EXAMPLE = support.ROOT / "examples" / "your_own_loop"
HELD_OUT = re.compile(r"held-out loss ([\d.]+); saved in")


def code(name: str) -> list[str]:
    """Return the lines of a script that are not empty, without its docstring."""
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    return [line for line in text.splitlines()[first.end_lineno :] if line.strip()]


def test_the_conversion_changes_few_lines_as_the_documents_say():
    new = [line for line in difflib.ndiff(code("ddp.py"), code("ft.py")) if line.startswith("+ ")]
    assert len(new) <= 15, new
    said = [support.ROOT / "docs" / "script.md", support.ROOT / "examples" / "README.md"]
    assert all(f"{len(new)} lines" in path.read_text(encoding="utf-8") for path in said)


def test_both_scripts_learn_the_task(tmp_path):
    """The losses are not equal: the two orders of the samples differ."""
    ddp = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        EXAMPLE / "ddp.py",
    ]
    by_ddp = subprocess.run(
        [*map(str, ddp), "--out", str(tmp_path / "ddp.pt")], capture_output=True, text=True, timeout=120, check=False
    )
    assert by_ddp.returncode == 0, by_ddp.stderr
    config = EXAMPLE / "ds_config.json"
    where = ["--groups", 2, "--config", config, "--run-dir", tmp_path / "run"]
    ours = support.ft("launch", *where, EXAMPLE / "ft.py", "--", "--out", tmp_path / "ft.pt")
    assert ours.returncode == 0, ours.stdout + ours.stderr
    logs = "".join(path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("*.log")))
    losses = [float(HELD_OUT.search(text)[1]) for text in (by_ddp.stdout, logs)]
    assert all(loss < 2.6 for loss in losses), losses  # 3.4 before training
    assert (tmp_path / "ft.pt").exists()


def run_of(tmp_path, name: str, holds=()) -> support.Run:
    """Run a script of the example with 2 groups and exact reduction, short."""
    script = support.changed_script(tmp_path / f"{name}.py", "", EXAMPLE / f"{name}.py")
    own = ["--epochs", 1, "--out", tmp_path / f"{name}.pt"]
    known = json.loads((EXAMPLE / "ds_config.json").read_text())
    section = {**known.get("fault_tolerance", {}), "reduction": "exact", "rejoin": {"enabled": False}}
    section["detector"] = {"stopped_timeout_s": support.TIMEOUT_S}
    config = tmp_path / f"{name}.json"
    config.write_text(json.dumps({**known, "fault_tolerance": section}))
    where = ["--groups", 2, "--config", config, "--run-dir", tmp_path / name]
    env = {**os.environ, **injection_points.to_env(list(holds))}
    process = warm.launch("launch", *where, script, "--", *own, env=env)
    support.started.append(process)
    return support.Run(tmp_path / name, process, 2)


def test_a_loop_of_its_own_gives_the_same_bits_when_a_group_dies(tmp_path):
    with_loss_fn = run_of(tmp_path, "ft")
    with_loss_fn.finish()
    hold = Breakpoint(1, 20, "backward")
    own = run_of(tmp_path, "own_loop", [hold])
    own.strike(hold)
    own.finish()
    assert own.process.returncode == with_loss_fn.process.returncode == 0, own.logs()
    assert support.outcome(own) == support.outcome(with_loss_fn) and own.events("fault")


MISUSE = {
    "a turn without backward": (
        "session.backward(loss)",
        "pass",
        "call session.backward(loss) once for each microbatch",
    ),
    "backward twice": (
        "session.backward(loss)",
        "session.backward(loss); session.backward(loss)",
        "session.backward outside of a loop over session.microbatches, or twice in one turn of it",
    ),
    "commit in the loop": (
        "session.backward(loss)",
        "session.backward(loss); session.commit()",
        "session.commit before the loop over session.microbatches has ended",
    ),
    "an engine with a loss function": (
        "session.wrap(model, optimizer, scheduler=scheduler)",
        "session.wrap(model, optimizer, loss_fn)",
        "leave loss_fn out in session.wrap",
    ),
    "an exception in the loop": (
        "loss = loss_fn(model, batch)",
        "raise ValueError('a mistake of the script')",
        "a mistake of the script",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_a_loop_that_is_wrong_is_told(tmp_path, case):
    before, after, words = MISUSE[case]
    text = (EXAMPLE / "own_loop.py").read_text(encoding="utf-8")
    assert before in text
    (tmp_path / "wrong.py").write_text(text.replace(before, after), encoding="utf-8")
    (tmp_path / "sums.py").write_text((EXAMPLE / "sums.py").read_text(encoding="utf-8"), encoding="utf-8")
    where = ["--groups", 1, "--config", EXAMPLE / "ds_config.json", "--run-dir", tmp_path / "run"]
    said = support.ft("launch", *where, tmp_path / "wrong.py", "--", "--out", tmp_path / "out.pt")
    assert said.returncode != 0 and words in said.stdout + said.stderr
