"""What becomes of the arguments of an unchanged script of Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.config import megatron_arguments, megatron_lm_arguments, schema
from megatron_ft.config.megatron_lm_arguments import CHANGED, NEWEST, REFUSED
from megatron_ft.errors import ConfigError

APPENDED = megatron_lm_arguments.changed([]).words


def test_arguments_are_kept_in_their_order_with_their_values():
    words = (
        "--lr 1e-3 --data-path 0.7 a 0.3 b --bf16 --distributed-backend gloo --global-batch-size 16 --loss=-1".split()
    )
    found = megatron_lm_arguments.changed(words)
    assert found.words == [*words, *APPENDED] and found.notes == []
    assert (found.checks_nan, found.missing, found.backend) == (True, None, "gloo")
    found = megatron_lm_arguments.changed([])
    assert found.words == [*"--no-check-for-nan-in-loss-and-grad --rerun-mode disabled --no-one-logger".split()]
    assert (found.checks_nan, found.missing, found.backend) == (True, "--global-batch-size", None)


def test_a_later_gather_of_parameters_comes_with_what_megatron_asks_for():
    found = megatron_lm_arguments.changed(["--overlap-grad-reduce", "--overlap-param-gather"])
    with_it = ["--overlap-param-gather", "--overlap-grad-reduce", "--no-align-param-gather"]
    assert found.words == [*with_it, *APPENDED] and len(found.notes) == 1


def test_what_would_be_the_batch_of_one_group_is_missing():
    schedule = ["--step-batch-size-schedule", "0:8 100:16"]
    assert megatron_lm_arguments.changed(schedule).missing == "--eval-global-batch-size"
    assert megatron_lm_arguments.changed([*schedule, "--eval-global-batch-size", "8"]).missing is None


DONE = {
    "--train-iters 30": 30,
    "--train-iters=31": None,
    "--train-samples 480 --global-batch-size 16": 30,
    "--train-samples 496 --global-batch-size=16": None,
    "--train-samples 480 --step-batch-size-schedule 0:16": None,
    "": None,
}


@pytest.mark.parametrize("words", DONE)
def test_all_iterations_are_done_when_the_last_one_is_saved(tmp_path, words):
    (tmp_path / NEWEST).write_text("30\n")
    assert megatron_lm_arguments.done(words.split(), str(tmp_path)) == DONE[words]
    assert megatron_lm_arguments.done(words.split(), str(tmp_path / "none")) is None


def _values(count: int) -> list[str]:
    return [str(number) for number in range(3 if count == -1 else count)]


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_what_is_changed_goes_with_its_values_and_says_why(name):
    count, why = CHANGED[name]
    for given in [[name, *_values(count)], *([[f"{name}=x"]] if count else [])]:
        found = megatron_lm_arguments.changed(["--lr", "1", *given, "--bf16"])
        assert found.words == ["--lr", "1", "--bf16", *APPENDED]
        assert found.notes == ([f"{name} is left out: {why}"] if why else [])
        assert found.checks_nan == (name != "--no-check-for-nan-in-loss-and-grad")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_says_why_and_what_to_do(name):
    count, allowed, why, remedy = REFUSED[name]
    for given in [[name, *_values(count)], *([[f"{name}=x"]] if count else [])]:
        with pytest.raises(ConfigError) as refused:
            megatron_lm_arguments.changed(["--lr", "1", *given, "--bf16"])
        words = " ".join(given).replace("=", " ")
        assert str(refused.value) == f"{words} is not supported with --megatron-lm: {why}; {remedy}"
    if allowed is not None:
        assert megatron_lm_arguments.changed([name, *allowed]).words == [name, *allowed, *APPENDED]
        assert megatron_lm_arguments.changed([f"{name}={allowed[0]}"]).words == [name, *allowed, *APPENDED]


def _run(words: str, ranks: int | None = None, raw: dict | None = None, shards: int = 2) -> schema.RunConfig:
    found = megatron_arguments.settings_of_script(raw or {}, words.split(), shards, ranks)
    return schema.resolve(found, groups=shards, ranks_per_group=ranks, shards=shards)


SIZES = {
    "nothing": ("", None, (1, 1, 1, 1), 1),
    "stages and slices": ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4", None, (8, 2, 4, 1), 1),
    "ranks for data parallelism": ("--tensor-model-parallel-size=2", 8, (8, 1, 2, 4), 4),
    "experts": ("--expert-model-parallel-size 4", None, (4, 1, 1, 4), 4),
    "context": ("--context-parallel-size 2", None, (2, 1, 1, 2), 1),
    "context and data": ("--context-parallel-size 2", 8, (8, 1, 1, 8), 4),
    "experts over a context": ("--context-parallel-size 2 --expert-model-parallel-size 4", None, (4, 1, 1, 4), 2),
}
"""Arguments and ranks of a group -> its ranks, stages, slices and inner shards, and data-parallel ranks."""


@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_sizes_of_a_group(case):
    """The batch is counted in samples of a data-parallel rank, as Megatron does; without one it is one microbatch each."""
    words, ranks, sizes, data = case
    run = _run(f"{words} --micro-batch-size 3", ranks)
    assert (run.ranks_per_group, run.stages, run.slices, run.inner_shards) == sizes
    assert run.samples_per_microbatch == 3 * data and run.microbatches == 2
    run = _run(f"{words} --micro-batch-size 3 --global-batch-size {3 * data * 8}", ranks)
    assert (run.samples_per_microbatch, run.microbatches, run.microbatches_per_group) == (3 * data, 8, 4)


def test_what_else_the_config_gets_from_arguments():
    run = _run("--seed 5 --calculate-per-token-loss --clip-grad 0.5")
    section = run.fault_tolerance
    assert (section.seed, section.loss_reduction, run.gradient_clipping) == (5, "token", 0.5)
    assert section.inner_shards_divide == "script" and _run("").gradient_clipping == 1.0


CONTRADICTIONS = {
    "--tensor-model-parallel-size 2 --context-parallel-size 2": (6, {}, "--ranks-per-group 6 is no multiple of 4"),
    "--context-parallel-size 2": (None, {"fault_tolerance": {"inner_shards": 3}}, "inner_shards is 3 and --context"),
    "--micro-batch-size 2 --global-batch-size 10": (None, {}, "train_batch_size"),
    "--micro-batch-size two": (None, {}, "invalid int value"),
    "--pipeline-model-parallel-size 2": (None, {"pipeline": {"stages": 4}}, "pipeline.stages"),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions_are_refused(words):
    ranks, raw, message = CONTRADICTIONS[words]
    with pytest.raises(ConfigError, match=message):
        _run(words, ranks, raw)


def test_the_page_has_each_argument_that_is_changed_or_refused():
    page = (Path(__file__).parents[2] / "docs" / "megatron-lm.md").read_text()
    for name, (_, why) in CHANGED.items():
        assert f"| `{name}` | {why} |" in page if why else f"`{name}`" in page
    for name, (_, allowed, why, remedy) in REFUSED.items():
        but = f" (but {', '.join(allowed)})" if allowed else ""
        assert f"| `{name}`{but} | {why}; {remedy} |" in page


def test_a_directory_of_tensorboard_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for given in (["--tensorboard-dir", f"{tmp_path}/file"], [f"--tensorboard-dir={tmp_path}/file/in"]):
        with pytest.raises(ConfigError, match=f"--tensorboard-dir {tmp_path}/file.*name one that can be written to"):
            megatron_lm_arguments.check_directory(["--lr", "1", *given])
    megatron_lm_arguments.check_directory(["--tensorboard-dir", f"{tmp_path}/new", "--lr", "1"])
    assert not list((tmp_path / "new").iterdir())
