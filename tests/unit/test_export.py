"""A checkpoint as a whole model: stages and slices are put together, and nothing is exported that was guessed."""

from __future__ import annotations

import json
import re
import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_ft import cli
from megatron_ft.core.lifecycle.checkpoint_policy import Found
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint import export, llama, undivided

WHOLE = {
    "0.weight": torch.arange(24.0).reshape(6, 4),
    "1.qkv.weight": torch.arange(48.0).reshape(12, 4),
    "1.out.weight": torch.arange(16.0).reshape(4, 4),
    "1.norm": torch.ones(4),
    "2.weight": torch.arange(24.0).reshape(6, 4),
}
CUT = {"1.qkv.weight": [0, 3], "1.out.weight": [1, 1]}
NAMES = {"0": "model.embed_tokens", "1-1": "model.layers.*", "2": "lm_head"}


def sliced(tensor: torch.Tensor, number: int, slices: int, how: list[int] | None) -> torch.Tensor:
    if how is None:
        return tensor
    axis, matrices = how
    return torch.cat([matrix.chunk(slices, axis)[number] for matrix in tensor.chunk(matrices, 0)], 0).contiguous()


def save(directory, stages=2, slices=2, cut=CUT, model=None, step=4):
    """Write a checkpoint of WHOLE as the ranks of a group would: layers 0 and 1 are in the first of two stages."""
    directory.mkdir(exist_ok=True)
    receipts = []
    for position in range(stages * slices):
        stage, number = divmod(position, slices)
        own = {name: tensor for name, tensor in WHOLE.items() if stages == 1 or stage == (name[0] == "2")}
        module = {name: sliced(tensor, number, slices, CUT.get(name)) for name, tensor in own.items()}
        state = {"module": module, "sharding": {name: how for name, how in cut.items() if name in own}}
        receipts.append(checkpoint.write_part(directory, step, "a", position, checkpoint.snapshot(state, 0, 1)))
    settings = {"pipeline": {"stages": stages}, "tensor_parallel": {"autotp_size": slices}}
    meta = {"settings": {**settings, "fault_tolerance.model": model or {}}}
    options = {"run_id": "run", "groups": 2, "ranks_per_group": stages * slices, "meta": meta}
    checkpoint.complete(directory, step, "a", receipts, **options)
    return checkpoint.find(directory)[0]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_stages_and_slices_are_put_together(tmp_path, stages, slices):
    whole = undivided.of(save(tmp_path / "saved", stages, slices)).tensors
    assert whole.keys() == WHOLE.keys()
    assert all(torch.equal(whole[name], WHOLE[name]) for name in WHOLE)


def test_slices_of_which_nothing_says_how_they_were_cut_are_refused(tmp_path):
    found = save(tmp_path / "saved", cut={"1.out.weight": [1, 1]})
    with pytest.raises(CheckpointError, match=r"1.qkv.weight differs between the slices.*partition_dim"):
        undivided.of(found)


@pytest.mark.parametrize("kind", ["torch", "hf"])
def test_what_is_exported_is_what_other_programs_read(tmp_path, kind, capsys):
    save(tmp_path / "saved", model={"model_type": "llama", "vocab_size": 1})
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "saved"), "--format", kind, "--out", str(out)]
    assert cli.main([*command, "--names", str(tmp_path / "names.json")]) == 0
    assert "step 4: 5 tensors with 116 elements" in capsys.readouterr().out
    read = torch.load(out) if kind == "torch" else load_file(out / "model.safetensors")
    assert torch.equal(read["model.layers.0.qkv.weight"], WHOLE["1.qkv.weight"])
    assert torch.equal(read["lm_head.weight"], WHOLE["2.weight"]) and len(read) == len(WHOLE)
    if kind == "hf":
        assert json.loads((out / "config.json").read_text()) == {"model_type": "llama", "vocab_size": 6}
    assert not list(tmp_path.glob(".out*")), "no temporary file is left"
    assert cli.main(command) == 2 and "exists; name another place" in capsys.readouterr().err


@given(first=st.integers(0, 20), count=st.integers(1, 20))
def test_a_range_of_names_counts_from_0(first, count):
    names = {f"{first}-{first + count - 1}": "layers.*", "tied": "embed"}
    tensors = {f"{first + number}.w": torch.tensor(number) for number in range(count)} | {"tied.w": torch.tensor(-1)}
    renamed = export.renamed(tensors, names)
    assert {name: int(tensor) for name, tensor in renamed.items()} == {
        "embed.w": -1,
        **{f"layers.{number}.w": number for number in range(count)},
    }


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"0": "a"}, "no entry for 1"),
        ({"3-999999999": "layers.*"}, "no entry for 0.weight; known are: 3-999999999"),
        ({"0-2": "a"}, "needs a \\*"),
        ({"2-0": "a.*"}, "needs a \\*"),
        ({"0": "a", "1": "b", "2": "b.norm"}, "no entry|the name"),
        ({"0": "a", "1": "b", "2": "a"}, None),
    ],
)
def test_names_that_do_not_fit_are_refused(names, why):
    tensors = {"0.weight": torch.ones(2), "1.norm": torch.ones(1), "2.weight": torch.ones(2)}
    if why is None:
        assert export.renamed(tensors, names).keys() == {"a.weight", "b.norm"}, "tied weights have one name"
        return
    if "the name" in why:
        names, tensors = {"0": "a", "1": "b", "2": "a"}, {**tensors, "2.weight": torch.zeros(2)}
    with pytest.raises(ConfigError, match=why):
        export.renamed(tensors, names)


def test_the_list_shows_what_is_complete_and_verify_finds_a_changed_byte(tmp_path, capsys):
    directory = tmp_path / "saved"
    save(directory)
    found = save(directory, step=8)
    (directory / "step-00000012-a").mkdir()
    assert cli.main(["checkpoint", "list", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if " step-0" in line] == ["8", "4"]
    assert "step-00000012-a is not complete: it has no manifest.json: its save was not finished" in shown
    assert cli.main(["checkpoint", "verify", str(directory)]) == 0
    part = next((directory / found.path).glob("position-0000/part*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["checkpoint", "verify", str(directory)]) == 1
    said = capsys.readouterr().out
    assert "step 8: damaged" in said and "step 4: all 8 files are intact" in said
    assert cli.main(["checkpoint", "verify", str(directory), "--step", "4"]) == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [(["list", "nowhere"], "is not a directory"), (["verify", "."], "there is no complete checkpoint in")],
)
def test_a_directory_without_checkpoints_is_said_to_be_one(tmp_path, words, why, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["checkpoint", *words]) == 2
    assert why in capsys.readouterr().err
    assert cli.main(["checkpoint", "list", "."]) == 0 and "there is no checkpoint" in capsys.readouterr().out


def test_a_run_is_exported_from_the_checkpoint_directory_of_its_config(tmp_path, capsys):
    run, saved = tmp_path / "run", tmp_path / "saved"
    run.mkdir()
    save(saved)
    (run / "history.jsonl").write_text('{"event": "start", "groups": 2}\n')
    command = ["export", str(run), "--format", "torch", "--out", str(tmp_path / "model.pt")]
    (run / "config.json").write_text(json.dumps({"fault_tolerance": {"checkpoint": {"directory": ""}}}))
    assert cli.main(command) == 2 and "has saved no checkpoint" in capsys.readouterr().err
    (run / "config.json").write_text(json.dumps({"fault_tolerance": {"checkpoint": {"directory": "elsewhere"}}}))
    assert cli.main(command) == 2 and "elsewhere, which is not a directory from here" in capsys.readouterr().err
    (run / "config.json").write_text(json.dumps({"fault_tolerance": {"checkpoint": {"directory": str(saved)}}}))
    assert cli.main([*command, "--step", "5"]) == 2 and "no complete checkpoint of step 5" in capsys.readouterr().err
    assert cli.main(command) == 0 and torch.load(tmp_path / "model.pt").keys() == WHOLE.keys()


def test_a_format_that_the_model_does_not_have_is_refused(tmp_path, capsys):
    save(tmp_path / "saved")
    command = ["export", str(tmp_path / "saved"), "--format", "megatron", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 2 and "is no checkpoint of session.megatron" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


def test_names_a_place_and_a_tokenizer_that_do_not_fit_are_refused(tmp_path, capsys):
    save(tmp_path / "saved")
    command = ["export", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]
    for words, why in (
        (["--format", "hf"], "begin with the numbers of a pipeline's layers.*--names FILE"),
        (["--format", "torch", "--out", str(tmp_path / "no" / "out")], "no is not a directory; make it"),
        (["--format", "torch", "--tokenizer", str(tmp_path)], "is for --format hf; leave it out"),
        (["--format", "hf", "--tokenizer", str(tmp_path)], "has no tokenizer.json and no tokenizer.model"),
    ):
        assert cli.main([*command, *words]) == 2
        assert re.search(why, capsys.readouterr().err), why
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_tokenizer_is_copied_beside_the_model(tmp_path):
    save(tmp_path / "saved")
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    (tmp_path / "mine").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "meta.json"):
        (tmp_path / "mine" / name).write_text(name)
    command = ["export", str(tmp_path / "saved"), "--format", "hf", "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--names", str(tmp_path / "names.json"), "--tokenizer", str(tmp_path / "mine")]) == 0
    copied = ["model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == copied
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"


def test_an_empty_name_takes_a_beginning_away():
    assert export.renamed({"module.0.weight": torch.ones(1)}, {"module": ""}).keys() == {"0.weight"}


@pytest.mark.parametrize("kind", export.FORMATS)
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, kind):
    """A limit on the size of files stands for it."""
    tensors = {"model.norm.weight": torch.ones(10_000)}
    model = undivided.Model(
        3, tensors=tensors, keyed=tensors if kind == "megatron" else {}, objects=["extra/shard_0_1"]
    )
    monkeypatch.setattr(undivided, "of", lambda found: model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match="out"):
            export.export(Found("a checkpoint", 3, True), kind, tmp_path / "out", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"normalization": "LayerNorm"}, "has normalization 'LayerNorm', Hugging Face's Llama 'RMSNorm'"),
        ({}, "has decoder.layers.0.mlp.linear_fc2.bias, which Hugging Face's Llama has not"),
    ],
)
def test_a_megatron_model_that_is_no_llama_is_not_called_one(settings, why):
    with pytest.raises(ConfigError, match=why):
        llama.converted({"decoder.layers.0.mlp.linear_fc2.bias": torch.ones(2)}, settings)
