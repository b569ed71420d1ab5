"""Every command of the documentation exists as it is written there, and the commands that take seconds are run.

``RUN`` lists the commands that are run. The others need a cluster, a live run or minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ft import cli
from tests import documented, support
from tests.documented import Command

COMMANDS = documented.commands()
RUN = (
    "megatron-ft prepare --out data/sotu",
    "megatron-ft plan --preset llama3-16k",
    "megatron-ft inject runs/any examples/fault_injection/two_lost.json --groups 4 --dry-run",
    "megatron-ft inject runs/any --mix 8 --seed 3 --groups 8 --dry-run --write drawn.json",
    "python examples/reproduce_recover/reproduce.py --quick --out runs/quick",
    "megatron-ft doctor",
    "cp slurm/site.env.example slurm/site.env",
)
"""The lines that are run here, in the order of the pages, all in one copy of the project."""
WRAPPERS = {"srun", "mpirun", "torchrun", "deepspeed", "sbatch"}
SHELL = {"cp", "tail", "eval", "hostname", "git", "cd", "source", "export", "pip", "sacct"}
"""Programs that do not belong to the project."""


def known(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Return why that parser does not know an option among these words; empty if it knows all of them."""
    options = set(parser._option_string_actions)
    own = words[: words.index("--")] if "--" in words else words
    wrong = [word for word in own if word.startswith("--") and word.partition("=")[0] not in options]
    return f"{parser.prog} has no {' '.join(wrong)}" if wrong else ""


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


def ours(words: list[str]) -> str:
    """Check a command ``megatron-ft ...``; the command that a ``supervise`` is given is checked, too."""
    commands = subcommands(cli._parser())
    if not words or words[0] not in commands:
        return f"megatron-ft has no {words[0] if words else 'command'}"
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    if words[0] == "supervise" and "launch" in words:
        place = words.index("launch")
        return known(commands[words[0]], words[1:place]) or ours(words[place:])
    if nested := subcommands(commands[words[0]]):
        if words[1:2] == [] or words[1] not in nested:
            return f"megatron-ft {words[0]} has no {words[1] if words[1:] else 'command'}"
        return known(nested[words[1]], words[2:script])
    return known(commands[words[0]], words[1:script])


def of_script(words: list[str]) -> str:
    """Check ``python FILE ...`` or ``python -m MODULE ...``: the script is asked with --help, as scripts have parsers
    of their own."""
    module = words[0] == "-m"
    path = support.ROOT / (words[1].replace(".", "/") + ".py" if module else words[0])
    if module and not path.exists():
        path = path.with_suffix("") / "__main__.py"
    if not path.is_file():
        return f"there is no {path.relative_to(support.ROOT)}"
    after = words[2:] if module else words[1:]
    level = [word for word in after[:1] if not word.startswith("-")] if "slurm_lab" in path.name else []
    start = ["-m", words[1]] if module else [str(path)]
    environment = {**os.environ, "PYTHONPATH": str(support.ROOT)}
    asked = [sys.executable, *start, *level, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=support.ROOT, env=environment)
    if done.returncode:
        return f"{' '.join(asked)} ends with {done.returncode}: {done.stderr}"
    options = set(re.findall(r"--[\w-]+", done.stdout))
    wrong = [word for word in after if word.startswith("--") and word.partition("=")[0] not in options]
    files = [word for word in after if "/" in word and word.endswith((".json", ".yaml"))]
    missing = [word for word in files if not (support.ROOT / word).exists()]
    return f"{path.name} has no {' '.join(wrong)}" if wrong else f"there is no {missing[0]}" if missing else ""


def of_make(words: list[str]) -> str:
    targets = {line.partition(":")[0] for line in (support.ROOT / "Makefile").read_text().splitlines() if ":" in line}
    wrong = [word for word in words if "=" not in word and word not in targets]
    return f"make has no {' '.join(wrong)}" if wrong else ""


def inside(words: list[str]) -> str:
    """Check the command that another program is told to start: one of our commands, modules or scripts."""
    if "megatron-ft" in words:
        return ours(words[words.index("megatron-ft") + 1 :])
    for option in ("-m", "--module"):
        if option in words:
            module = support.ROOT / (words[words.index(option) + 1].replace(".", "/") + ".py")
            return "" if module.is_file() else f"there is no {module}"
    script = next((word for word in words if word.endswith(".sbatch")), None)
    if script is not None:
        return "" if (support.ROOT / script).is_file() else f"there is no {script}"
    return "" if words[-1] in SHELL else f"{words[0]} is to start nothing of ours"


def wrong(command: Command) -> str:
    """Return what is wrong with the command; empty when all is right."""
    words = [word for word in command.words if word != "..."]
    while words and "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]  # settings for one command
    program, rest = words[0], words[1:]
    match program:
        case "megatron-ft":
            return ours(rest)
        case "python" | "python3":
            return of_script(rest)
        case "make":
            return of_make(rest)
        case _ if program in WRAPPERS:
            return inside(rest)
    return "" if program in SHELL else f"{program} is nothing of this project"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_each_command_exists_with_its_options(command):
    assert not wrong(command), f"{command}: {wrong(command)}"


@pytest.mark.parametrize(
    "line",
    [
        "megatron-ft launch --gruops 4",
        "megatron-ft lunch",
        "make demmo",
        "python tools/lab.py up",
        "python tools/slurm_lab.py up --node 3",
        "sbatch slurm/prtrain.sbatch",
        "srun -N3 megatron-ft doctor --dir x",
        "torchrun -m megatron_ft.cluster.launchers.launcher_shm train.py",
        "megatron-ft supervise --arrray launch --groups 4",
        "megatron-ft supervise --array launch --grups 4",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_found(line):
    assert wrong(Command("page", 1, line))


def test_blocks_are_read_as_they_are_meant():
    page = "```sh\na --b \\\n   c   # why\n\n# only words\nd\n```\n```\nnot this\n```\n"
    page += "```python\nor this\n```\n```sh\ne\n```\n"
    assert [command.line for command in documented.of("page", page)] == ["a --b c", "d", "e"]
    assert [command.number for command in documented.of("page", page)] == [2, 6, 15]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A fresh clone of the project, without its tests; this interpreter's environment."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("examples", "slurm"):
        subprocess.run(["cp", "-r", support.ROOT / name, root / name], check=True)
    (root / "slurm" / "site.env").unlink(missing_ok=True)
    return root


@pytest.mark.long
def test_commands_that_take_seconds_are_run_as_they_are_written(copy):
    """The order is that of the pages: a command may need the output of an earlier one."""
    chosen = [command for command in COMMANDS if command.line in RUN]
    assert {command.line for command in chosen} == set(RUN)
    (copy / "bin").mkdir()
    (copy / "bin" / "megatron-ft").write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_ft.cli "$@"\n')
    (copy / "bin" / "megatron-ft").chmod(0o755)
    path = f"{copy / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(support.ROOT), "OMP_NUM_THREADS": "1"}
    done: set[str] = set()
    for command in chosen:
        if command.line not in done:
            done.add(command.line)
            ran = subprocess.run(
                ["bash", "-c", command.line], capture_output=True, text=True, cwd=copy, env=environment
            )
            assert ran.returncode == 0, f"{command}: {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
