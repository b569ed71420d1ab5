"""A lossless byte-pair tokenizer: ``decode(encode(text)) == text`` for every text.

sentencepiece is configured without normalisation and without added or removed spaces; it encodes characters without a
piece as bytes, and no piece crosses a newline. Training is deterministic: equal text and vocabulary size give equal
pieces.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from megatron_ft.errors import DataError
from megatron_ft.utils import extras

EOD_PIECE = "<eod>"
BLOCK_CHARS = 1 << 20  # encoding takes some hundred bytes of memory per character, so long documents are divided
_FIXED_PIECES = 260  # every byte, <unk>, <eod>, newline and space
_LINE_CHARS = 1 << 14  # sentencepiece counts positions inside a word with 16 bits
# sentencepiece writes a space as U+2581 inside pieces, so a U+2581 of the text would be decoded as a space. It is encoded
# as bytes, which decode to themselves.
_SPACE_MARK = "\u2581"
_SPACE_MARK_BYTES = tuple(f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode())
# The trainer skips or refuses these inside a sentence; in text they are encoded as bytes anyway.
_SEPARATORS = re.compile("[\n\t\0\u2581\u2585]")


class Tokenizer:
    """A trained tokenizer. ``model`` holds the bytes of a sentencepiece model, which any sentencepiece can read.

    :meth:`encode` never produces piece 0, ``<unk>``, nor ``eod_id``, which ends a document. Raises ``DataError`` if
    ``model`` cannot be read.
    """

    def __init__(self, model: bytes) -> None:
        with extras.needed():
            import sentencepiece
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError("the tokenizer model is damaged: run `megatron-ft prepare` again") from error
        self.model = model
        self.vocab_size: int = self._pieces.vocab_size()
        self.eod_id: int = self._pieces.piece_to_id(EOD_PIECE)
        self._space_mark_ids = [self._pieces.piece_to_id(piece) for piece in _SPACE_MARK_BYTES]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a model file, or the ``tokenizer.model`` of a prepared directory. Raises ``DataError`` if there is
        none."""
        file = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        try:
            return cls(file.read_bytes())
        except OSError as error:
            raise DataError(
                f"{file}: there is no tokenizer ({error.strerror}): run `megatron-ft prepare --out {file.parent}`"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, each in ``range(vocab_size)``, without an end-of-document id."""
        return [token for block in self.encode_blocks(text) for token in block]

    def encode_blocks(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of :meth:`encode` in blocks of about ``BLOCK_CHARS`` characters, which limits the memory.

        Blocks end at a newline or at a space mark. No piece crosses either of them, so the ids are the same.
        """
        for block in _blocks(text):
            for number, part in enumerate(block.split(_SPACE_MARK)):
                if number:
                    yield self._space_mark_ids
                if part:
                    yield self._pieces.encode(part)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, without end-of-document ids. Raises ``IndexError`` for an id outside the
        range."""
        return self._pieces.decode([int(token) for token in tokens])


def _blocks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        newline = text.find("\n", start + BLOCK_CHARS)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, every: int = 1, lower: bool = False) -> Tokenizer:
    """Train a byte-pair tokenizer.

    Args:
        texts: Text to train on.
        vocab_size: Number of pieces, 260 of which are bytes and special pieces.
        every: Use only one of this many lines, for texts larger than memory.
        lower: Where the text is too small for ``vocab_size``, use the largest possible vocabulary (see
            ``Tokenizer.vocab_size``) instead of raising.

    Raises:
        DataError: ``vocab_size`` is too large or too small for the text; the message names the limit.
    """
    if not _FIXED_PIECES < vocab_size < 2**31:
        raise DataError(
            f"--vocab-size {vocab_size} must be above {_FIXED_PIECES} (256 bytes, 4 special pieces) and below 2**31: "
            "use --vocab-size 4096"
        )
    with extras.needed():
        import sentencepiece
    lines = islice(_training_lines(texts), 0, None, every)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # then the number of pieces is the limit
            num_threads=1,  # the order of merges depends on it
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            required_chars=_SPACE_MARK,  # otherwise a space may have no piece, and is lost
            unk_id=0,
            eos_id=1,
            eos_piece=EOD_PIECE,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=8 * _LINE_CHARS,  # bytes; its default would silently skip long lines
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(error, vocab_size) from error
    tokenizer = Tokenizer(model.getvalue())
    if tokenizer.vocab_size < vocab_size and not lower:
        raise DataError(
            f"--vocab-size {vocab_size} is too large for this text, which allows at most {tokenizer.vocab_size}: "
            f"use --vocab-size {tokenizer.vocab_size} or smaller, or more text"
        )
    return tokenizer


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines without the characters that the trainer refuses, and not longer than its counters allow."""
    for text in texts:
        for line in _SEPARATORS.split(text):
            for start in range(0, len(line), _LINE_CHARS):
                yield line[start : start + _LINE_CHARS]


def _training_error(error: RuntimeError, vocab_size: int) -> Exception:
    """Return a ``DataError`` for what a user can correct. Any other error is a bug and is returned unchanged."""
    needed = re.search(r"smaller than required_chars\. -?\d+ vs (\d+)", str(error))
    if needed:
        return DataError(
            f"--vocab-size {vocab_size} is too small: bytes, special pieces and the characters of this text need "
            f"{needed[1]}: use --vocab-size {needed[1]} or larger"
        )
    if "sentences_.empty()" in str(error) or "all_chars_count" in str(error):
        return DataError("the text has no characters to train on: give more text")
    return error
