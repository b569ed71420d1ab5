"""Shell scripts of the project are clean."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests import support

SCRIPTS = [support.ROOT / ".ci" / "run", *sorted((support.ROOT / "slurm").glob("*.sbatch"))]


@pytest.mark.system
@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="no shellcheck here; as root: apt-get install shellcheck"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(["shellcheck", "-x", script], capture_output=True, text=True, cwd=support.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
