"""The paths that each measured number depends on: list the numbers that are older, and measure them again.

    python benchmarks/evidence.py status              # make evidence-status: which results are older than their code
    python benchmarks/evidence.py measure [NAME ...]  # make evidence: measure all again, or these, in this order

``KEPT`` is the one list of all results. ``common.save`` copies what a result depends on into the result itself, beside the
commit it was measured at and the changes that were not committed then (``dirty``); what ``KEPT`` names counts, too. A result
without a commit of its own (a CSV file, a picture's record) counts as measured at the last commit that changed it.
"""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"


def _paths(text: str) -> tuple[str, ...]:
    return tuple(f"megatron_ft/{path}" for path in text.split())


STEP = _paths("core run types.py")
"""The parts of the package that make up a training step, its recovery and the protocol."""
RUN = (*STEP, *_paths("host cluster/launchers data config"))
MODEL = ("benchmarks/recovery_model.py",)
DECIDED = _paths(
    "core/protocol core/detection core/replication core/scheduling core/lifecycle/store_failover.py "
    "core/lifecycle/checkpoint_protocol.py"
)
"""The decisions that the simulated world takes."""
SIMULATED = _paths("core plan")


@dataclass(frozen=True)
class Kept:
    """A result: the file, relative to the repository, the command that measures it, and the paths it depends on."""

    path: str
    command: str
    depends_on: tuple[str, ...]


def _result(name: str, command: str, *depends_on: str) -> tuple[str, Kept]:
    script = next(word for word in shlex.split(command) if word.endswith(".py") or "." in word)
    own = script if script.endswith(".py") else script.replace(".", "/")
    own = f"{own}.py" if (ROOT / f"{own}.py").exists() else own
    return name, Kept(f"{RESULTS}/{name}.json", command, (own, *depends_on))


KEPT = dict([
    _result("overhead", "benchmarks/overhead.py", *STEP),
    _result("unblock", "benchmarks/overhead.py --unblock",
            *_paths("run/collectives/gloo_communicator.py run/collectives/gloo_sockets.py utils/socket_tracker.py")),
    _result("engines", "benchmarks/engines.py --pairs 40", *STEP),
    _result("megatron_lm", "benchmarks/megatron_lm.py", "tests/megatron_lm", "megatron_ft/integrations/megatron_lm", *STEP),
    _result("two_levels", "benchmarks/two_levels.py", "tools/netlab.py",
            *_paths("run/collectives/gloo_communicator.py run/collectives/two_level_communicator.py")),
    _result("fsdp_reduce", "benchmarks/fsdp_reduce.py", "benchmarks/engines.py"),
    _result("state_check", "benchmarks/state_check.py", *_paths("run/state_checksum.py run/engines data/batch_digest.py")),
    _result("recovery", "benchmarks/recovery.py --trials 5 --default-trials 1",
            "benchmarks/recovery_ours.py", *MODEL, *RUN),
    _result("hogs", "benchmarks/recovery.py --hogs 5 --alone", "benchmarks/recovery_hogs.py", *RUN),
    _result("rejoin", "benchmarks/rejoin.py --trials 5", "benchmarks/rejoin_torchft.py", *MODEL, *RUN),
    _result("goodput", "benchmarks/goodput.py --trials 3 --steps 100", "benchmarks/goodput_torchft.py", *MODEL, *RUN),
    _result("policies", "benchmarks/policies.py", "benchmarks/goodput.py", "benchmarks/goodput_torchft.py", *MODEL, *RUN),
    _result("recover_live", "benchmarks/recover_live.py", "benchmarks/goodput.py", "examples/pretrain_gpt_deepspeed",
            *MODEL, *RUN),
    _result("scale", "benchmarks/scale.py", "benchmarks/scale_standins.py", *STEP),
    _result("slurm_return", "benchmarks/slurm_return.py --trials 5", "tools/slurm_lab.py", *RUN),
    _result("history", "benchmarks/history.py",
            *_paths("record/history.py record/run_record.py record/run_state.py core/detection/stragglers.py record")),
    _result("store_growth", "benchmarks/store_growth.py",
            *_paths("run/store core/protocol/key_lifetimes.py"), "tests/growth.py"),
    _result("soak", "benchmarks/soak.py --kills 200", "megatron_ft/utils/heap.py", *RUN),
    _result("storage_outage", "benchmarks/storage_outage.py", *RUN),
    _result("decisions", "benchmarks/decisions.py", *_paths("core types.py")),
    _result("blend", "benchmarks/blend.py", "megatron_ft/data/indexed.py"),
    _result("simulator", "benchmarks/simulator.py", *SIMULATED),
    _result("simgrid", "benchmarks/simgrid.py", "tools/allreduce.py", "tools/simgrid_allreduce.py", "tools/simgrid_run.py",
            *SIMULATED),
    _result("explore",
            "-m megatron_ft.proof.explore --seeds 200000 --jobs 2 --out benchmarks/results/explore.json",
            *DECIDED, *_paths("proof types.py")),
    _result("explore_device",
            "-m megatron_ft.proof.explore --device --policy each --seeds 100000 --jobs 2 "
            "--out benchmarks/results/explore_device.json",
            *DECIDED, *_paths("proof types.py")),
    _result("chaos", "-m tests.chaos --runs 80 --seed 0 --out benchmarks/results/chaos.json",
            "megatron_ft/cluster/faults", *RUN),
    _result("chaos_exact", "-m tests.chaos --exact --runs 200 --seed 0 --out benchmarks/results/chaos_exact.json",
            "megatron_ft/cluster/faults", *RUN),
    *(
        _result(name, f"-m tests.chaos --engine {engine} --runs 20 --exact --out benchmarks/results/{name}.json",
                "megatron_ft/cluster/faults", *RUN)
        for name, engine in (("chaos_fsdp", "fsdp"), ("chaos_torch_pipeline", "torch-pipeline"), ("chaos_tp", "tp"),
                             ("chaos_megatron", "megatron"))
    ),
    _result("chaos_impurities",
            "-m tests.chaos.impurities --runs 100 --out benchmarks/results/chaos_impurities.json", *RUN),
    _result("corruption", "-m tests.corruption --runs 67", "megatron_ft/cluster/faults", *RUN),
    _result("exact", "benchmarks/exact.py", *STEP),
    _result("gpu_h200", "-m pytest tests/gpu/test_training_gpu.py tests/gpu/test_exact_gpu.py "
            "tests/gpu/test_engines_gpu.py", "tests/gpu",
            "benchmarks/exact.py", *STEP),
    _result("exact_quality", "benchmarks/exact.py --part quality", *STEP),
    _result("exact_training", "benchmarks/exact.py --part training", *STEP),
    _result("host_losses", "-m tests.host_losses --save", "tests/netlab.py", *RUN),
    _result("engine_memory", "-m tests.conformance.memory", *STEP),
    _result("engine_kills", "-m tests.engine_kills", *RUN),
    _result("checkpoint_kills", "-m tests.checkpoint_kills 10 2", *RUN),
    _result("fuzz", "-m tests.fuzz --save", *_paths(
        "utils/auth/handshake.py utils/auth/secret.py run/collectives/framing.py run/rejoin/state_sender.py "
        "run/rejoin/state_receiver.py run/store core/protocol/signals.py run/checkpoint/peer_copies.py "
        "run/checkpoint/memory_copies.py host/checkpoint_cache.py host/heartbeat.py cluster/doctor/host_orders.py "
        "cluster/doctor/meeting.py cluster/doctor/bandwidth.py"
    )),
    ("reproduce_spare", Kept("docs/results/spare_table.csv", "examples/reproduce_spare/reproduce.py",
                             ("examples/reproduce_spare", *SIMULATED))),
    ("reproduce_recover", Kept("docs/results/recover_headline.csv", "examples/reproduce_recover/reproduce.py",
                               ("examples/reproduce_recover", *SIMULATED))),
])  # fmt: skip


def depends_on(name: str) -> list[str]:
    """The paths that the result of that name depends on; empty for a result that is not kept."""
    return list(KEPT[name].depends_on) if name in KEPT else []


@dataclass(frozen=True)
class Age:
    """The age of a result: ``changes`` are the commits since it was measured that touch its paths, newest first; none if
    they have changed only comments, docstrings and layout.

    ``uncommitted``: there are changes of that kind which are not committed. ``dirty``: there were changes that were not
    committed when it was measured, so that no commit has the code that it speaks of. ``problem`` says why the age cannot be
    told; empty where it can.
    """

    name: str
    changes: tuple[str, ...] = ()
    uncommitted: bool = False
    dirty: bool = False
    problem: str = ""

    @property
    def fresh(self) -> bool:
        return not (self.changes or self.uncommitted or self.dirty or self.problem)

    def __str__(self) -> str:
        if self.problem:
            return f"?    {self.name}: {self.problem}"
        if self.fresh:
            return f"ok   {self.name}"
        newest = f", the newest: {self.changes[0]}" if self.changes else ""
        more = " and changes that are not committed" if self.uncommitted else ""
        more += ", measured with changes that were not committed" if self.dirty else ""
        return f"old  {self.name}: {len(self.changes)} commits since{more}{newest}"


def age(name: str, kept: Kept, root: Path = ROOT) -> Age:
    """Compare the commit of a result with the history of its paths, in the repository at ``root``."""
    file = root / kept.path
    if not file.exists():
        return Age(name, problem="never measured")
    said = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else {}
    paths = list(dict.fromkeys((*said.get("depends_on", ()), *kept.depends_on)))
    commit = said.get("commit") or _git(root, "log", "-1", "--format=%H", "--", kept.path)
    if not commit or _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") == "":
        return Age(name, problem=f"measured at {commit or 'an unknown commit'}, which this clone does not have")
    changes = _git(root, "log", "--format=%h %s", f"{commit}..HEAD", "--", *paths).splitlines()
    changed = (
        _git(root, "diff", "--no-renames", "--name-only", commit, "HEAD", "--", *paths).splitlines() if changes else []
    )
    if not any(_is_code_changed(root, commit, path) for path in changed):
        changes = []
    return Age(name, tuple(changes), bool(_git(root, "status", "--porcelain", "--", *paths)), bool(said.get("dirty")))


def _is_code_changed(root: Path, commit: str, path: str) -> bool:
    """Return whether a file differs from that commit in more than comments, docstrings and layout."""
    if not path.endswith(".py"):
        return True
    before, after = (_git(root, "show", f"{version}:{path}") for version in (commit, "HEAD"))
    return not before or not after or _code(before) != _code(after)


def _code(text: str) -> str:
    """Return a module without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(root: Path, *arguments: str) -> str:
    """Return the output of git, empty when it fails."""
    found = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def status(root: Path = ROOT) -> int:
    """Print the age of every result; return the number of results that are not up to date."""
    ages = [age(name, kept, root) for name, kept in KEPT.items()]
    print(*ages, sep="\n")
    old = [one for one in ages if not one.fresh]
    print(f"{len(ages) - len(old)} of {len(ages)} results are as new as the code they speak of")
    return len(old)


def complete(name: str, root: Path = ROOT) -> None:
    """Add to a result the metadata that its command did not write: a command of the package knows no benchmark."""
    import common

    file = root / KEPT[name].path
    said = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else {"commit": ""}
    if "commit" not in said:
        about = common.about(name, f"python {KEPT[name].command}")
        file.write_text(json.dumps({**about, **said}, indent=1) + "\n", encoding="utf-8")


def measure(names: list[str], root: Path = ROOT) -> int:
    """Run the commands of these results, one after the other; return the number of those that failed.

    A measurement that failed does not replace a result: what it wrote is in ``NAME.failed`` beside it.
    """
    failed = []
    for name in names or list(KEPT):
        print(f"== {name}: python {KEPT[name].command}", flush=True)
        file, begun = root / KEPT[name].path, time.monotonic()
        before = file.read_bytes() if file.exists() else None
        code = subprocess.run([sys.executable, *shlex.split(KEPT[name].command)], cwd=root).returncode
        print(f"== {name}: {time.monotonic() - begun:.0f} s, exit code {code}", flush=True)
        if not code:
            complete(name, root)
            continue
        failed.append(name)
        if file.exists() and file.read_bytes() != before:
            file.replace(file.with_suffix(".failed"))
            if before is not None:
                file.write_bytes(before)
    print(f"failed: {' '.join(failed)}" if failed else "all are measured; read the differences before you commit them")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Evidence: how old it is, and how to measure it again.")
    commands = parser.add_subparsers(dest="what", required=True)
    told = commands.add_parser("status", help="list the results that are older than the code they speak of")
    told.add_argument("--strict", action="store_true", help="exit code 1 when there is one")
    again = commands.add_parser("measure", help="measure again")
    again.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(KEPT)} (default: all, takes hours)")
    options = parser.parse_args()
    if options.what == "status":
        return int(bool(status()) and options.strict)
    unknown = [name for name in options.names if name not in KEPT]
    if unknown:
        parser.error(f"{' '.join(unknown)}: no such result; known are {', '.join(KEPT)}")
    return int(bool(measure(options.names)))


if __name__ == "__main__":
    sys.exit(main())
