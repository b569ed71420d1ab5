"""Tokenizers: one that ``train_tokenizer`` has trained, or the user's own, a sentencepiece model or a Hugging Face
``tokenizer.json``.

A trained one is a lossless byte-pair tokenizer: ``decode(encode(text)) == text`` for every text. sentencepiece is
configured without normalization and without added or removed spaces; it encodes characters without a piece as bytes, and
no piece crosses a newline. Training is deterministic: equal text and vocabulary size give equal pieces. A tokenizer of
the user's is taken as it is, and its file is kept unchanged.

Assumed failures: files that are missing, damaged or not of these kinds; tokenizers without a token that ends documents.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.errors import DataError
from megatron_ft.utils import extras, lfs_pointer

if TYPE_CHECKING:
    import tokenizers

EOD_PIECE = "<eod>"
EOD_TOKENS = ("<|endoftext|>", "</s>", EOD_PIECE, "<|end_of_text|>")
"""The usual names of the token that ends a document."""
JSON_FILE, MODEL_FILE = FILES = ("tokenizer.json", "tokenizer.model")
"""The names of a tokenizer in a directory, the first one that exists. The ending says of which kind a file is."""
BLOCK_CHARS = 1 << 20  # encoding takes some hundred bytes of memory per character, so long documents are divided
_FIXED_PIECES = 260  # every byte, <unk>, <eod>, newline and space
_AROUND_CHARS = 1 << 10
"""Characters on each side of a place, which show whether a text can be divided there."""
_LINE_CHARS = 1 << 14  # sentencepiece counts positions inside a word with 16 bits
# sentencepiece writes a space as U+2581 inside pieces, so a U+2581 of the text would be decoded as a space. It is encoded
# as bytes, which decode to themselves.
_SPACE_MARK = "\u2581"
_SPACE_MARK_BYTES = tuple(f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode())
# The trainer skips or refuses these inside a sentence; in text they are encoded as bytes anyway.
_SEPARATORS = re.compile("[\n\t\0\u2581\u2585]")
_FIRST_PIECES = ["<unk>", EOD_PIECE, "\n"]
"""The first pieces of a model that :func:`train_tokenizer` has made."""


class Tokenizer(ABC):
    """Text to token ids and back; see :meth:`load`. :meth:`encode` never produces ``eod_id``.

    Attributes:
        model: The bytes of its file.
        file_name: ``tokenizer.model`` or ``tokenizer.json``.
        vocab_size: Number of token ids.
        eod_token: The token that ends a document.
        eod_id: Its id.
        unknown: Number of characters and words without a token in all that was encoded: they became the token for
            unknown text, or were left out.
    """

    model: bytes
    file_name: str
    vocab_size: int
    eod_token: str
    eod_id: int
    unknown: int = 0

    @staticmethod
    def load(path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
        """Read a tokenizer: a file, or a directory's ``tokenizer.json`` or ``tokenizer.model``.

        Args:
            path: A Hugging Face ``tokenizer.json``, a sentencepiece ``.model``, or a directory with one of them, which
                may be one that ``prepare`` has written.
            eod_token: The token that ends a document. Default: that of the prepared directory, else the one of
                ``EOD_TOKENS`` that is a special token of the tokenizer.

        Raises:
            DataError: There is no tokenizer, it cannot be read, or it is not clear which token ends a document.
        """
        file = Path(path)
        digest = None
        if file.is_dir():
            meta = _described(file / "meta.json")
            if isinstance(meta, dict):
                eod_token, digest = eod_token or meta.get("eod_token"), meta.get("tokenizer_sha256")
            file = next((file / name for name in FILES if (file / name).is_file()), file / MODEL_FILE)
        lfs_pointer.refuse(file, DataError)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file}: there is no tokenizer ({error.strerror}): name a tokenizer.json or a sentencepiece .model"
                + ("" if Path(path).suffix else f", or run `megatron-ft prepare --out {shlex.quote(str(path))}`")
            ) from error
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise DataError(
                f"{file}: is not the tokenizer that made the tokens beside it: copy the directory again, or run "
                f"`megatron-ft prepare --out {shlex.quote(str(path))}`"
            )
        if file.suffix == ".json":
            return _HuggingFace(content, str(file), eod_token)
        return _SentencePiece(content, str(file), eod_token)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, each in ``range(vocab_size)``, without an end-of-document id."""
        return [token for block in self.encode_blocks(text) for token in block]

    def encode_blocks(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of :meth:`encode` in parts, which limits the memory: of about ``BLOCK_CHARS`` characters, if the
        tokenizer gives both sides of the end of a line the ids that they have together; else of the whole text."""
        start = end = 0
        for block in _blocks(text):
            end += len(block)
            around = text[max(end - _AROUND_CHARS, start) : end], text[end : end + _AROUND_CHARS]
            if not around[1] or self._ids("".join(around))[0] == [
                token for side in around for token in self._ids(side)[0]
            ]:
                ids, unknown = self._ids(text[start:end])
                self.unknown += unknown
                yield ids
                start = end

    @abstractmethod
    def _ids(self, text: str) -> tuple[list[int], int]:
        """Return the ids of a text, and the number of characters and words in it without a token."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, without end-of-document ids. Raises ``IndexError`` for an id outside the
        range."""

    def _end_documents(self, name: str, ids: Mapping[str, int], special: Collection[str], given: str | None) -> None:
        """Set ``eod_token`` and ``eod_id``. Raises ``DataError`` unless exactly one token is given or known, or if text can
        contain it."""
        rule = f"name a special token (of sentencepiece: a control symbol) with --eod-token; it has {_some(special)}"
        found = [token for token in EOD_TOKENS if token in special] if given is None else [given]
        if len(found) != 1:
            has = " and ".join(found) if found else f"none of {', '.join(EOD_TOKENS)}"
            raise DataError(
                f"{name}: which token ends a document is not clear, the tokenizer's special tokens have {has}: {rule}"
            )
        (self.eod_token,) = found
        if self.eod_token not in ids:
            raise DataError(f"{name}: --eod-token {self.eod_token!r} is not in the tokenizer's vocabulary: {rule}")
        self.eod_id = ids[self.eod_token]
        if self.eod_id in self.encode(self.eod_token):
            raise DataError(f"{name}: a text that contains {self.eod_token!r} would end a document there: {rule}")


class _SentencePiece(Tokenizer):
    """``model``: a sentencepiece model, which any sentencepiece can read. One that was trained here never produces piece 0,
    ``<unk>``."""

    def __init__(self, model: bytes, name: str = MODEL_FILE, eod_token: str | None = None) -> None:
        with extras.needed():
            import sentencepiece
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"{name}: the tokenizer model is damaged, or is none of sentencepiece's: give another file, or run "
                "`megatron-ft prepare` again"
            ) from error
        self.model, self.file_name = model, MODEL_FILE
        self.vocab_size = self._pieces.vocab_size()
        ids = {self._pieces.id_to_piece(number): number for number in range(self.vocab_size)}
        self._is_own = list(ids)[:3] == _FIRST_PIECES
        self._space_mark_ids = [self._pieces.piece_to_id(piece) for piece in _SPACE_MARK_BYTES]
        special = [piece for piece, number in ids.items() if self._pieces.is_control(number)]
        self._end_documents(name, ids, special, eod_token)

    def _ids(self, text: str) -> tuple[list[int], int]:
        ids = self._pieces.encode(text)
        return ids, ids.count(self._pieces.unk_id())

    def encode_blocks(self, text: str) -> Iterator[list[int]]:
        if not self._is_own:
            yield from super().encode_blocks(text)
            return
        # No piece crosses a newline or a space mark, so the ids are those of the whole text.
        for block in _blocks(text):
            for number, part in enumerate(block.split(_SPACE_MARK)):
                if number:
                    yield self._space_mark_ids
                if part:
                    yield self._pieces.encode(part)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._pieces.decode([int(token) for token in tokens])


class _HuggingFace(Tokenizer):
    """``model``: a ``tokenizer.json``. No special token is added to a text, and none is recognised in it."""

    def __init__(self, model: bytes, name: str, eod_token: str | None = None) -> None:
        with extras.needed():
            import tokenizers
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(model)
        except Exception as error:  # the library has no type of its own
            raise DataError(
                f"{name}: the tokenizer cannot be read ({error}): give a tokenizer.json of Hugging Face's tokenizers"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as the text that they are
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # equal text gives equal tokens
        self.model, self.file_name = model, JSON_FILE
        ids = self._tokenizer.get_vocab()
        self.vocab_size = max(ids.values(), default=-1) + 1  # there may be gaps
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        settings = json.loads(model)["model"]
        # Unigram has the number of its token for unknown text, other models its name.
        self._unk_id = ids.get(settings.get("unk_token") or "", settings.get("unk_id"))
        bytes_known = settings.get("byte_fallback") or ids.keys() >= set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        self._leaves_out = self._unk_id is None and not bytes_known
        self._name = name
        self._end_documents(name, ids, special, eod_token)

    def _ids(self, text: str) -> tuple[list[int], int]:
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library has no type of its own
            raise DataError(
                f"{self._name}: the tokenizer cannot encode a text ({error}): give it a token for unknown text"
            ) from error
        ids: list[int] = encoded.ids
        return ids, _left_out(text, encoded.offsets) if self._leaves_out else ids.count(self._unk_id)

    def decode(self, tokens: Iterable[int]) -> str:
        numbers = [int(token) for token in tokens]
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.vocab_size:
            raise IndexError(f"token ids {min(numbers)}..{max(numbers)} are not all in range({self.vocab_size})")
        return self._tokenizer.decode(numbers, skip_special_tokens=False)


def _left_out(text: str, places: Iterable[tuple[int, int]]) -> int:
    """Return the number of characters, apart from blanks, that are in no token's place."""
    end, left_out = 0, 0
    for begin, after in (*places, (len(text), len(text))):
        left_out += len("".join(text[end:begin].split()))
        end = max(end, after)
    return left_out


def _some(tokens: Collection[str]) -> str:
    return ", ".join(list(tokens)[:8]) + (f" and {len(tokens) - 8} more" if len(tokens) > 8 else "") or "none"


def _described(path: Path) -> Any:
    """Return what a prepared directory says of itself; None in another one. Its files may be links, as data often are."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _blocks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        newline = text.find("\n", start + BLOCK_CHARS)
        end = len(text) if newline < 0 else newline + 1
        yield text[start:end]
        start = end


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, every: int = 1) -> Tokenizer:
    """Train a byte-pair tokenizer.

    Args:
        texts: Text to train on.
        vocab_size: Number of pieces, 260 of which are bytes and special pieces.
        every: Use only one of this many lines, for texts larger than memory.

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
    tokenizer = _SentencePiece(model.getvalue())
    if tokenizer.vocab_size < vocab_size:
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
