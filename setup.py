"""What pyproject.toml cannot say: the README without links into the repository, and the files beside the package that
a wheel has, too (``megatron-ft examples --copy DIR``)."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SHIPPED = ("docs", "examples", "slurm")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


class BuildPy(build_py):
    """Copies documents, examples and sbatch scripts to ``megatron_ft/shipped``. An editable install reads the originals."""

    def run(self) -> None:
        super().run()
        for name in () if self.editable_mode else SHIPPED:
            target = Path(self.build_lib, "megatron_ft", "shipped", name)
            shutil.copytree(
                HERE / name, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "site.env")
            )


def readme() -> str:
    """Without pictures and links of the repository, which lead nowhere on a package index."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return LINK.sub(r"\1", re.sub(r"!" + LINK.pattern, "", text))


setup(cmdclass={"build_py": BuildPy}, long_description=readme(), long_description_content_type="text/markdown")
