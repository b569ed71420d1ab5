"""The wheel, installed with pip into new environments: one without torch, one in which the shipped example trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT, TIMEOUT_S

pytestmark = pytest.mark.system
PARTS = ("megatron_ft", "docs", "examples", "slurm")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")
ABSENT = ("torch", "ortools", "datasets", "sentencepiece", "networkx")


def clean() -> dict[str, str]:
    """Return this environment without variables that lead to the checkout or its virtual environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def ran(*words: object, cwd: Path, **more: str) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=cwd, env=clean() | more, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:  # a build leaves files where it runs
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    made = ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", target, source, cwd=target)
    if "No matching distribution found for setuptools" in made.stderr:
        pytest.skip("pip finds no setuptools to build the wheel with")
    assert made.returncode == 0, made.stderr
    (path,) = target.glob("*.whl")
    return path


def environment(path: Path, wheel: Path, *options: str) -> Path:
    """Make a virtual environment with the wheel; return its directory of programs."""
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    made = ran(path / "bin" / "pip", "install", "-q", *options, wheel, cwd=path)
    assert made.returncode == 0, made.stderr
    return path / "bin"


def test_the_description_has_no_link_that_an_index_cannot_follow(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
        assert "megatron_ft/py.typed" in archive.namelist()
        assert not any("__pycache__" in name or name.endswith("site.env") for name in archive.namelist())
    assert "# megatron_ft" in text and "License-Expression: Apache-2.0" in text
    links = re.findall(r"\]\(([^)]*)\)", text.partition("\n\n")[2])
    assert links and all(link.startswith("https://") for link in links), links


@pytest.mark.long
def test_without_torch_all_but_training_works(wheel, tmp_path):
    programs = environment(tmp_path / "base", wheel)
    here = tmp_path / "work"
    here.mkdir()

    def ft(*words: object) -> subprocess.CompletedProcess:
        return ran(programs / "megatron-ft", *words, cwd=here)

    have = ran(programs / "python", "-m", "pip", "list", "--format=json", cwd=here).stdout
    assert not {package["name"] for package in json.loads(have)} & set(ABSENT)
    assert "Fault-tolerant" in ft("--help").stdout
    planned = ft("plan", "--preset", "lab-64", "--out", "ft.json")
    assert planned.returncode == 0 and json.loads((here / "ft.json").read_text())
    simulated = ft("simulate", "--preset", "lab-64", "--trials", 1, "--jobs", 1, "--json")
    assert simulated.returncode == 0 and json.loads(simulated.stdout)
    assert ft("examples", "--copy", "ft").returncode == 0
    for name in ("docs", "examples", "slurm"):
        original = {
            path.relative_to(ROOT): path.read_bytes()
            for path in (ROOT / name).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.name != "site.env"
        }
        assert original == {
            path.relative_to(here / "ft"): path.read_bytes()
            for path in (here / "ft" / name).rglob("*")
            if path.is_file()
        }
    run = here / "run"
    run.mkdir()
    shutil.copy(here / "ft" / "docs" / "images" / "demo" / "history.jsonl", run)
    reported = ft("report", "run")
    assert reported.returncode == 0 and "SIGKILL" in reported.stdout and (run / "timeline.png").exists()
    doctor = ft("doctor", "--json")
    assert doctor.returncode == 1, "a machine without torch is not ready"
    assert any(found["what"] == "torch" and found["state"] != "ok" for found in json.loads(doctor.stdout))
    for words in (("launch", "--groups", 2, "--run-dir", "a", "x.py"), ("prepare", "--out", "d")):
        refused = ft(*words)
        assert refused.returncode == 2
        assert (
            refused.stderr
            == f"megatron-ft {words[0]}: torch is not installed here; run: pip install 'megatron_ft[train]'\n"
        )


@pytest.mark.long
def test_the_shipped_example_trains(wheel, tmp_path):
    """torch and the other libraries are those of the environment that runs the tests."""
    programs = environment(tmp_path / "train", wheel, "--no-deps")
    (site,) = (tmp_path / "train").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ft = programs / "megatron-ft"
    assert ran(ft, "examples", "--copy", "ft", cwd=tmp_path).returncode == 0
    prepared = ran(ft, "prepare", "--out", "data/small", "--vocab-size", 512, cwd=tmp_path / "ft")
    assert prepared.returncode == 0, prepared.stderr
    words = ("launch", "--groups", 2, "--config", "examples/pretrain_gpt/ds_config.json", "--run-dir", "run")
    script = ("examples/pretrain_gpt/train.py", "--", "--data", "data/small", "--steps", 3)
    done = ran(ft, *words, *script, cwd=tmp_path / "ft")
    assert done.returncode == 0 and "all 3 steps are done" in done.stdout, done.stdout + done.stderr
    where = ran(programs / "python", "-c", "import megatron_ft; print(megatron_ft.__file__)", cwd=tmp_path).stdout
    assert str(site) in where
