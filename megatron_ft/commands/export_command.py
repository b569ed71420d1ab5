"""The command ``megatron-ft export``: the model of a run, in the files that other programs load."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.commands.checkpoint_command import complete
from megatron_ft.config import settings_file
from megatron_ft.errors import ConfigError
from megatron_ft.record import run_directory


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft export``."""
    parser.add_argument("place", type=Path, metavar="RUN", help="directory of a run, or its checkpoint.directory")
    parser.add_argument(
        "--format",
        choices=("hf", "torch", "deepspeed", "megatron"),
        required=True,
        metavar="FORMAT",
        help="hf: a directory for from_pretrained; torch: a file for torch.load; deepspeed: a directory for "
        "load_checkpoint; megatron: a directory for megatron.core.dist_checkpointing",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PLACE", help="the new file or directory")
    parser.add_argument("--step", type=int, metavar="N", help="use the checkpoint of this step (default: the newest)")
    parser.add_argument("--names", type=Path, metavar="FILE", help="JSON file with old beginning of a name: new one")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="copy the tokenizer of this directory, too (--format hf)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Export the newest complete checkpoint, or that of ``options.step``. Raises ``FTError``."""
    from megatron_ft.run import checkpoint  # these import torch, which the options do without
    from megatron_ft.run.checkpoint import export

    names = {} if options.names is None else _names(options.names)
    tokenizer = [] if options.tokenizer is None else _tokenizer(options.tokenizer, options.format)
    directory = _directory(options.place)
    found = complete(checkpoint.find(directory), directory, options.step)[0]
    model = export.export(found, options.format, options.out, names, tokenizer)
    tensors = model.keyed if options.format == "megatron" else model.tensors
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"step {found.step}: {len(tensors)} tensors with {count} elements are in {options.out}")
    if options.format == "hf" and not model.config:
        print(
            f"the run's config has no fault_tolerance.model, and its model no config of transformers: from_pretrained needs "
            f"the model's config.json in {options.out}"
        )
    return 0


def _directory(place: Path) -> Path:
    """Return the checkpoint directory of a run, or ``place`` if it is none. Raises ``ConfigError``."""
    if not place.is_dir():
        raise ConfigError(f"{place} is not a directory; give the --run-dir or the checkpoint.directory of a run")
    if not (place / "config.json").is_file():
        return place
    section = run_directory.config(place).get("fault_tolerance", {})
    directory = section.get("checkpoint", {}).get("directory")
    if not directory:
        raise ConfigError(
            f"the run in {place} has saved no checkpoint: its config has no fault_tolerance.checkpoint.directory"
        )
    if not Path(directory).is_dir():
        raise ConfigError(
            f"the run in {place} saves in {directory}, which is not a directory from here; start the command where the run "
            f"was started, or give the checkpoint.directory itself"
        )
    return Path(directory)


def _tokenizer(directory: Path, kind: str) -> list[Path]:
    """Return the files of a tokenizer. Raises ``ConfigError``."""
    if kind != "hf":
        raise ConfigError(f"--tokenizer {directory} is for --format hf; leave it out")
    from megatron_ft.data.tokenizer import FILES

    names = (*FILES, "tokenizer_config.json", "special_tokens_map.json")
    found = [directory / name for name in names if (directory / name).is_file()]
    if not found or found[0].name not in FILES:
        raise ConfigError(
            f"--tokenizer {directory} has no {' and no '.join(FILES)}; name the directory of a tokenizer, or one that "
            f"megatron-ft prepare has written"
        )
    return found


def _names(path: Path) -> Mapping[str, str]:
    raw = settings_file.read(path, "--names")
    if not all(isinstance(new, str) for new in raw.values()):
        raise ConfigError(f"--names {path} must be a JSON object with old beginning: new one, both texts")
    return raw
