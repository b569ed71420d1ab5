"""Runs of Megatron-LM's own training loop with ``pretrain_gpt.py``: plain, by torchrun, and fault-tolerant.

The loop is that of the wheel of megatron-core :data:`VERSION` (``MEGATRON_CORE=0.18.2`` in the environment takes another
one), which is downloaded once and unpacked into the cache folder. It asks for Python 3.12 and a GPU; ``site/`` has
stand-ins for what is missing here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_ft.run import injection_points
from megatron_ft.utils import shared_file
from tests import support

VERSION = os.environ.get("MEGATRON_CORE", "0.19.2")
HERE = Path(__file__).parent
SCRIPT = HERE / "pretrain_gpt.py"
HELPERS = Path("megatron", "core", "datasets")
DOWNLOAD_S = 120.0
MODEL = (
    *("--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 64),
    *("--max-position-embeddings", 64, "--tokenizer-type", "NullTokenizer", "--vocab-size", 255),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--seed", 7),
    *("--micro-batch-size", 2, "--global-batch-size", 16, "--train-iters", 12, "--log-interval", 1),
    *("--lr", 1e-3, "--min-lr", 1e-4, "--lr-decay-style", "cosine", "--lr-warmup-iters", 2),
    *("--eval-iters", 2, "--eval-interval", 5, "--distributed-backend", "gloo", "--transformer-impl", "local"),
    *("--attention-backend", "unfused", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
)
"""Arguments of all runs; what a test adds comes later, and counts."""
MOCK = ("--mock-data",)
_NUMBER = r"([0-9.]+(?:E[+-]\d+)?|nan|inf)"
_ITERATION = re.compile(r" iteration +(\d+)/ +\d+ \| (.*)")
_EVALUATION = re.compile(r" validation loss at iteration (\d+(?: on \w+ set)?) \| (.*)")
_VALUE = re.compile(rf"([^|:]+): +{_NUMBER} \|")
_OTHERS = ("elapsed time per iteration (ms)", "allocated", "max allocated", "reserved", "max reserved")
"""Values that differ between runs, or that another rank of torchrun has written into the same line."""


def unpacked() -> Path:
    """Return the directory that has ``megatron`` of :data:`VERSION`. Skips the test if it cannot be had."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core is not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_ft"
    found = cache / f"megatron-core-{VERSION}-py3.{sys.version_info.minor}"
    if found.is_dir():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        pip += ["--python-version", "3.12", "--only-binary=:all:", f"megatron-core=={VERSION}"]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=DOWNLOAD_S)
        if done.returncode:
            pytest.skip(f"megatron-core {VERSION} cannot be downloaded: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(temporary).glob("*.whl")
        whole = Path(temporary, "unpacked")
        zipfile.ZipFile(wheel).extractall(whole)
        compiled = Path(str(helpers.__file__))  # for this Python; its functions are the same since 0.16
        shutil.copy2(compiled, whole / HELPERS / compiled.name)
        try:
            whole.rename(found)
        except OSError:  # another process was first
            assert found.is_dir()
    return found


def environment(megatron: Path) -> dict[str, str]:
    """Return the variables with which a run uses that ``megatron``."""
    path = os.pathsep.join(map(str, (HERE / "site", megatron, support.ROOT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@dataclass(frozen=True)
class Said:
    """What Megatron's own lines say: name -> value for each iteration, and for each evaluation (``"5"``, ``"12 on test
    set"``); the logs that were read; and what the launcher printed."""

    iterations: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    printed: str = ""

    def read(self, text: str) -> None:
        """Add the lines of a log. What several ranks say of an iteration must be the same."""
        self.logs.append(text)
        for where, pattern in ((self.iterations, _ITERATION), (self.evaluations, _EVALUATION)):
            for name, rest in pattern.findall(text):
                key = int(name) if where is self.iterations else name
                values = {
                    name.strip(): float(value) for name, value in _VALUE.findall(rest) if name.strip() not in _OTHERS
                }
                assert where.setdefault(key, values) == values, f"{key} is logged with {where[key]} and {values}"


def _all(own: Sequence[object]) -> list[object]:
    """Return :data:`MODEL` and ``own``, without ``--global-batch-size`` where Megatron refuses it."""
    words = [*MODEL, *own]
    while "--step-batch-size-schedule" in words and (batch := "--global-batch-size") in words:
        del words[words.index(batch) : words.index(batch) + 2]
    return words


def plain(megatron: Path, ranks: int, *own: object, script: Path = SCRIPT) -> Said:
    """Run plain Megatron with that number of ranks to its end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    words = [*map(str, (*torchrun, script, *_all(own)))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(words, env=environment(megatron), timeout=support.TIMEOUT_S, **pipes)
    assert done.returncode == 0, done.stdout
    said = Said()
    said.read(done.stdout)
    return said


def start(
    directory: Path,
    megatron: Path,
    ranks: int,
    *own: object,
    groups: int = 2,
    script: Path = SCRIPT,
    holds: Sequence[injection_points.Breakpoint] = (),
    extra: Sequence[object] = (),
    config: Mapping[str, object] | None = None,
    **changes: object,
) -> support.Run:
    """Start the same with ``groups`` groups of ``ranks`` ranks. ``extra``: options of launch; ``config``: keys of the
    config, ``changes``: keys of its section."""
    detector = {"stopped_timeout_s": support.TIMEOUT_S, "straggler_factor": 0}
    section = {"rejoin": {"enabled": False}, "detector": detector, **changes}
    path = directory.with_suffix(".json")
    shared_file.write_json(path, {**(config or {}), "fault_tolerance": section})
    launch = ["launch", "--groups", groups, "--ranks-per-group", ranks, "--run-dir", directory, "--config", path]
    launch += ["--megatron-lm", "--preload", "megatron.training.training", *extra, script, "--"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    env = {**environment(megatron), **injection_points.to_env(list(holds))}
    process = subprocess.Popen(support.command(*launch, *_all(own)), **pipes, env=env)
    # Megatron prints 600 lines of arguments; a test that waits for an event reads them later.
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
    support.started.append(process)
    return support.Run(directory, process, groups, exact=section.get("reduction") == "exact")


def said(run: support.Run) -> Said:
    """Wait for the end of a run, which must be a good one, and return what the ranks of all its groups say."""
    output = run.finish()
    assert run.process.returncode == 0, f"exit code {run.process.returncode}\n{output}\n{run.logs()}"
    return said_so_far(run, output)


def said_so_far(run: support.Run, printed: str = "") -> Said:
    """Return what the ranks of all groups have said."""
    found = Said(printed=printed)
    for log in sorted(run.directory.glob("logs/*.log")):
        found.read(log.read_text())
    return found


def differences(reference: Said, *parts: Said, relative: float = 1e-5) -> list[str]:
    """Return where a run says something else than plain Megatron. ``parts``: of the run and of those that went on from its
    checkpoints, which together have all iterations and evaluations."""
    wrong = []
    for kind in ("iterations", "evaluations"):
        expected, whole = getattr(reference, kind), {}
        for part in parts:
            found = getattr(part, kind)
            whole |= found
            for key, values in found.items():
                for name, value in expected.get(key, {}).items():
                    if kind == "iterations" and name.endswith("loss") and key == min(found) + 1 > 2:
                        # Megatron prints the mean of the losses of the first two iterations of a process.
                        value = (value + expected[key - 1][name]) / 2
                    own, within = values.get(name), relative * abs(value)
                    if name == "grad norm":
                        within += 1e-3  # printed with three decimals
                    if own is None or not abs(own - value) <= within:
                        wrong.append(f"{key}: {name} is {value} in plain Megatron, {own} here")
        if whole.keys() != expected.keys():
            wrong.append(f"{kind} {list(expected)} are logged by plain Megatron, {list(whole)} here")
    return wrong


def curves(directory: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return the x and values of all points of each name in the only file that TensorBoard's writers have left in a
    directory."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    (file,) = directory.iterdir()
    events = accumulator.EventAccumulator(str(file), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    return {name: ([one.step for one in own], [one.value for one in own]) for name, own in found.items()}
