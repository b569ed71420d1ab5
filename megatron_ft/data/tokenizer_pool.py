"""Tokenizing with several processes: the documents of a corpus, in order, whatever the number of processes.

Each worker process encodes spans of documents, which it reads from the Arrow files that all share; this process gets the
tokens in the order of the spans. A worker ends with its parent.

Assumed failures: a worker is killed (an error, nothing is written), Ctrl-C, this process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from megatron_ft.data.corpus import has_text
from megatron_ft.data.tokenizer import Tokenizer
from megatron_ft.errors import DataError
from megatron_ft.utils import lifeline, process_name

if TYPE_CHECKING:
    from datasets import Dataset

DOCUMENTS_PER_SPAN = 64
PROGRESS_S = 5.0
"""Seconds between lines that say how far the work is, where there is no terminal."""
REFRESH_S = 0.2
"""The same for the bar on a terminal."""
LOOK_S = 0.5
"""Seconds of a wait for a worker, after which this process looks for signals."""
Span = tuple[list[np.ndarray], int]
"""The tokens of each document of a span, and the number of characters and words without a token."""
_AHEAD = 4
"""Spans for each worker that are encoded or wait to be written: these limit the memory."""


def tokenize(
    documents: Dataset,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    workers: int,
    log: Callable[[str], object],
) -> Generator[list[np.ndarray]]:
    """Yield the tokens of the documents that have text, in order, each with its end-of-document id. Lists have those of some
    documents each.

    Args:
        documents: Documents, with the column "text".
        tokenizer: Encodes the text.
        dtype: Type of the tokens.
        workers: Number of processes, >= 1. With 1, or with few documents, it is done in this process.
        log: Called with a line every ``PROGRESS_S``, unless stderr is a terminal, where a bar is shown; and at the end with
            the number of characters and words without a token, if there are any.

    Raises:
        DataError: A worker has died, or the tokenizer cannot encode a text, or ends a document inside of one.
    """
    starts = range(0, len(documents), DOCUMENTS_PER_SPAN)
    count = min(workers, len(starts))
    encode = _Encoder(documents, tokenizer, dtype)
    spans = (encode(start) for start in starts) if count <= 1 else _in_processes(encode, starts, count)
    return _with_progress(spans, len(documents), log)


class _Encoder:
    """Encodes the span of documents that begins at a number. Returns also what the tokenizer did not know in them."""

    def __init__(self, documents: Dataset, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self._documents, self._tokenizer, self._dtype = documents, tokenizer, dtype
        self._end = np.array([tokenizer.eod_id], dtype=dtype)

    def __call__(self, start: int) -> Span:
        texts, before = self._documents[start : start + DOCUMENTS_PER_SPAN]["text"], self._tokenizer.unknown
        return [self._tokens(text) for text in texts if has_text(text)], self._tokenizer.unknown - before

    def _tokens(self, text: str) -> np.ndarray:
        blocks = [np.array(block, dtype=self._dtype) for block in self._tokenizer.encode_blocks(text)]
        tokens = np.concatenate([*blocks, self._end])
        if (tokens[:-1] == self._end).any():
            raise DataError(
                f"the tokenizer gives a text the token that ends documents, {self._tokenizer.eod_token}: name another one "
                "with --eod-token"
            )
        return tokens


def _in_processes(encode: _Encoder, starts: range, count: int) -> Generator[Span]:
    """Yield ``encode(start)`` for all starts, in order. The processes end with the iterator, without finishing their work
    if it is closed early."""
    others = set(multiprocessing.active_children())
    # Forked: the tokenizer and the documents are there already.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin, (os.getpid(), encode))
    waiting: deque[Future[Span]] = deque()
    complete = False
    try:
        for start in starts:
            waiting.append(pool.submit(_encode, start))
            if len(waiting) >= _AHEAD * count:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
        complete = True
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenized has died; if the kernel killed it for memory (dmesg says so), use fewer --workers"
        ) from None
    finally:
        if not complete:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
        pool.shutdown(cancel_futures=True)


def _result(span: Future[Span]) -> Span:
    """Return the result when it is there. A Ctrl-C that comes just before a wait begins is seen when the wait ends."""
    while not span.done():
        wait([span], LOOK_S)
    return span.result(0.0)


_encoder: _Encoder | None = None


def _begin(parent: int, encode: _Encoder) -> None:
    """Prepare a worker process: it ends with its parent, and Ctrl-C is the parent's affair."""
    global _encoder
    lifeline.end_with(parent)
    process_name.take("tokenizer", "ft-tokenize")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _encoder = encode


def _encode(start: int) -> Span:
    assert _encoder is not None, "the process was prepared"
    return _encoder(start)


def _with_progress(spans: Generator[Span], total: int, log: Callable[[str], object]) -> Generator[list[np.ndarray]]:
    from rich.console import Console
    from rich.progress import Progress

    shown = sys.stderr.isatty()
    began = said = time.monotonic()
    done = tokens = unknown = 0
    # No refreshing thread: the workers are forked later.
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False, disable=not shown)
    with closing(spans), bar:
        task = bar.add_task("tokenizing", total=total)
        for encoded, more_unknown in spans:
            yield encoded
            unknown += more_unknown
            done, tokens = min(done + DOCUMENTS_PER_SPAN, total), tokens + sum(map(len, encoded))
            now = time.monotonic()
            if now - said < (REFRESH_S if shown else PROGRESS_S):
                continue
            said, left_s = now, (now - began) * (total - done) / done
            bar.update(task, completed=done, description=f"{tokens / 1e6:,.1f} million tokens", refresh=True)
            if not shown:
                log(
                    f"tokenized {done:,} of {total:,} documents ({done / total:.0%}), {tokens / 1e6:,.1f} million tokens, "
                    f"about {left_s:.0f} s left"
                )
    if unknown:
        log(
            f"the tokenizer has no token for {unknown:,} characters or words of the text, in {tokens:,} tokens: they are "
            f"lost in the data (a tokenizer of bytes loses none)"
        )
