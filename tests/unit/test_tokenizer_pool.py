"""Several processes tokenize: the same bytes whatever their number, and nothing half-written whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from megatron_ft.data import prepare, read_meta, tokenizer_pool
from megatron_ft.data.tokenizer import Tokenizer, _SentencePiece
from megatron_ft.errors import DataError
from tests import support
from tests.unit.test_user_tokenizer import json_file


@pytest.fixture
def text_file(tmp_path):
    """300 documents, some of them blank: five spans."""
    file = tmp_path / "text.jsonl"
    texts = [f"Document {number} says little. " * (number % 7) for number in range(300)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.mark.parametrize("kind", ["trained", "tokenizer.json"])
def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path, text_file, kind, capfd):
    how = {"vocab_size": 310} if kind == "trained" else {"tokenizer": json_file(tmp_path / kind)}
    for workers in (1, 2, 3):
        prepare(tmp_path / str(workers), [text_file], **how, workers=workers, log=lambda line: None)
    assert capfd.readouterr() == ("", "")
    names = ("tokens.bin", "tokens.idx", "meta.json", "tokenizer.model" if kind == "trained" else kind)
    one, two, three = ([(tmp_path / str(workers) / name).read_bytes() for name in names] for workers in (1, 2, 3))
    assert one == two == three
    assert read_meta(tmp_path / "1").num_documents == 300 - 43


def test_without_a_terminal_lines_say_how_far_it_is(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(tokenizer_pool, "PROGRESS_S", 0)
    lines: list[str] = []
    prepare(tmp_path / "out", [text_file], 310, workers=2, log=lines.append)
    told = [line for line in lines if line.startswith("tokenized ")]
    assert told[0].startswith("tokenized 64 of 300 documents (21%), ") and "300 of 300 documents (100%)" in told[-1]


def test_a_worker_that_is_killed_is_an_error_and_nothing_is_written(tmp_path, text_file, monkeypatch):
    own, encode = os.getpid(), _SentencePiece.encode_blocks

    def killed(self: Tokenizer, text: str):
        if os.getpid() != own and text.startswith("Document 250 "):
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, text)

    monkeypatch.setattr(_SentencePiece, "encode_blocks", killed)
    with pytest.raises(DataError, match="a process that tokenized has died.*use fewer --workers"):
        prepare(tmp_path / "out", [text_file], 310, workers=2, log=lambda line: None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    with pytest.raises(DataError, match="not a complete dataset"):
        read_meta(tmp_path / "out")


_STUCK = """
import os, signal, sys
from megatron_ft import cli
from megatron_ft.data.tokenizer import _SentencePiece
own = os.getpid()
def stuck(self, text):
    if os.getpid() != own:
        os.write(1, b"stuck\\n")
        signal.pause()
    return iter(())
_SentencePiece.encode_blocks = stuck
sys.exit(cli.main(["prepare", "--out", *sys.argv[1:], "--vocab-size", "310", "--workers", "2"]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.long)]
)
def test_the_processes_end_with_a_prepare_that_is_interrupted(tmp_path, text_file, number, code):
    command = [sys.executable, "-c", _STUCK, str(tmp_path / "out"), "--text", str(text_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=support.ROOT)
    support.started.append(process)
    assert process.stdout.readline() == b"stuck\n"
    process.send_signal(number)
    process.communicate(timeout=support.TIMEOUT_S)  # the workers have the pipe, too: it ends when all have ended
    assert process.returncode == code
    assert not (tmp_path / "out" / "meta.json").exists()
    assert bool(list((tmp_path / "out").glob(".preparing-*"))) == (number == signal.SIGKILL)
    prepare(tmp_path / "out", [text_file], 310, log=lambda line: None)
    assert read_meta(tmp_path / "out") and not list((tmp_path / "out").glob(".preparing-*"))


def test_a_document_that_would_end_inside_of_itself_is_refused():
    tokenizer = SimpleNamespace(eod_id=1, eod_token="<eod>", unknown=0, encode_blocks=lambda text: [[5], [1, 6]])
    encode = tokenizer_pool._Encoder(Dataset.from_dict({"text": ["a"]}), tokenizer, np.dtype("<u2"))
    with pytest.raises(DataError, match="gives a text the token that ends documents, <eod>: name another one"):
        encode(0)
