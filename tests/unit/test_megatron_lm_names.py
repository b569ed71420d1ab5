"""What is replaced and read of Megatron-LM's loop is looked up before its script runs."""

from __future__ import annotations

import re
import sys

import pytest

from megatron_ft.errors import EngineError
from megatron_ft.integrations.megatron_lm import names
from tests import support

LOOP, WRITERS, ARTIFACTS = "a_loop_of_megatron", "writers_of_megatron", "artifacts_of_megatron"
STEP = f"({', '.join(names.STEP)}) = train_step()"


def _source() -> str:
    """Return a module that has all that is needed."""
    functions = [f"def {name}({', '.join((*begin, 'further=None'))}): pass" for name, begin in names.REPLACED.items()]
    calls = [f"    {name}()" for name in names.REPLACED if name != "train_step"]
    mpu = ["class mpu:", *(f"    {name[4:]} = None" for name in names.READ if name.startswith("mpu."))]
    read = [f"{name} = None" for name in (*names.READ, "evaluate_and_print_results") if "." not in name]
    return "\n".join([*functions, *mpu, *read, "def loop():", *calls, f"    {STEP}", ""])


@pytest.fixture
def looked_up(tmp_path, monkeypatch):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    monkeypatch.setattr(names, "LOOP", LOOP)
    monkeypatch.setattr(names, "WRITERS", WRITERS)
    monkeypatch.setattr(names, "ARTIFACTS", ARTIFACTS)
    monkeypatch.syspath_prepend(tmp_path)

    def look_up(source: str) -> tuple[object, tuple[str, ...]]:
        (tmp_path / f"{LOOP}.py").write_text(source)
        for module, has in ((WRITERS, names.REPLACED_WRITERS), (ARTIFACTS, names.REPLACED_ARTIFACTS)):
            (tmp_path / f"{module}.py").write_text("".join(f"{name} = None\n" for name in has))
        return names.loop()

    yield look_up
    for name in (LOOP, WRITERS, ARTIFACTS):
        sys.modules.pop(name, None)


def test_a_version_with_all_names_is_taken(looked_up):
    module, values = looked_up(_source())
    assert (module.__name__, values) == (LOOP, names.STEP)


def test_the_number_of_values_of_a_step_is_that_of_the_version(looked_up):
    assert looked_up(_source().replace(", max_attention_logit)", ")"))[1] == names.STEP[:-1]


@pytest.mark.parametrize(
    ("present", "instead", "lacking"),
    [
        ("def training_log(", "def log(", f"{LOOP}.training_log"),
        ("get_num_microbatches = None", "", f"{LOOP}.get_num_microbatches"),
        ("is_pipeline_last_stage = None", "pass", f"{LOOP}.mpu.is_pipeline_last_stage"),
        ("    evaluate()", "    run(evaluate)", f"call of {LOOP}.evaluate"),
        (
            "def evaluate(forward_step_func, data_iterator",
            "def evaluate(data_iterator",
            f"{LOOP}.evaluate(forward_step_func, ",
        ),
        (
            "def dummy_train_step(data_iterator, further=None)",
            "def dummy_train_step()",
            f"{LOOP}.dummy_train_step(data_iterator",
        ),
        ("skipped_iter, ", "skipped_iter, loss_scale, ", "loss_dict, skipped_iter, should_checkpoint"),
        (STEP, "result = train_step()", "loss_dict, skipped_iter, should_checkpoint"),
    ],
)
def test_a_version_without_a_name_is_refused(looked_up, present, instead, lacking):
    import megatron.core

    source = _source()
    assert present in source
    told = f"megatron-core {megatron.core.__version__} has no {lacking}"
    with pytest.raises(EngineError, match=f"^{re.escape(told)}.*tested: {re.escape(names.TESTED)}$"):
        looked_up(source.replace(present, instead))


def test_megatron_core_without_a_loop_is_refused(looked_up):
    with pytest.raises(EngineError, match=f"{LOOP} cannot be imported .*belongs into PYTHONPATH"):
        looked_up("import gone_from_megatron")


def test_every_name_that_is_read_is_on_the_list():
    read = set()
    for path in (support.ROOT / "megatron_ft" / "integrations" / "megatron_lm").glob("*.py"):
        text = path.read_text()
        read |= set(re.findall(r"self\._module\.((?!mpu\b)\w+)", text))
        read |= {f"mpu.{name}" for name in re.findall(r"\bmpu\.(\w+)\(", text)}
    assert len(read) > 5
    assert read <= {*names.READ, *names.REPLACED}
