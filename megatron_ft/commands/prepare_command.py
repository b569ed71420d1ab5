"""The command ``megatron-ft prepare``: text into a dataset of packed samples."""

from __future__ import annotations

import argparse
from pathlib import Path


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``megatron-ft prepare``."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the prepared dataset")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="txt or jsonl (also .gz, .zst) or parquet files, or directories written by save_to_disk (default: State of the "
        "Union addresses)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of token ids of a tokenizer trained on the text (default: 4096)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE_OR_DIR",
        help="a tokenizer of yours in its place: Hugging Face's tokenizer.json or a sentencepiece .model",
    )
    parser.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="its token that ends a document (default: <|endoftext|> or another usual name)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: one for each core)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prepare the dataset. Returns the exit code; raises ``FTError``."""
    from megatron_ft import data

    data.prepare(
        options.out,
        options.text,
        options.vocab_size,
        tokenizer=options.tokenizer,
        eod_token=options.eod_token,
        workers=options.workers,
    )
    return 0
