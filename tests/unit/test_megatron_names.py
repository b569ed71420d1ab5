"""What the engine needs of megatron-core beyond its documentation is looked up before it is used."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.pretrain_gpt_megatron import on_cpu
from megatron_ft.errors import EngineError
from megatron_ft.run.engines.megatron import megatron_names
from tests import support


@pytest.fixture
def megatron():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    import megatron.core

    return megatron.core


def test_a_version_without_a_name_is_refused(megatron):
    megatron_names.check(megatron_names.NAMES + on_cpu.REPLACED)
    said = (
        rf"megatron-core {re.escape(megatron.__version__)} has no megatron.core.gone, megatron.core.distributed._gone, "
    )
    remedy = f"install a megatron-core with which it was tested: {re.escape(megatron_names.TESTED)}"
    with pytest.raises(EngineError, match=f"{said}.*{remedy}"):
        megatron_names.check(("megatron.core.gone", "megatron.core.distributed._gone", "megatron.core.parallel_state"))


def test_a_version_without_an_attribute_of_its_objects_is_refused(megatron):
    lists = dict.fromkeys(megatron_names._LISTS, [])
    megatron_names.check_chunks([SimpleNamespace(**lists)])
    with pytest.raises(EngineError, match="has no DistributedDataParallel.buffers, which"):
        megatron_names.check_chunks([SimpleNamespace(**{**lists, "buffers": lambda: iter(())})])
    buffer = SimpleNamespace(params=[], data_parallel_group=None, data_parallel_world_size=1)
    with pytest.raises(EngineError, match=r"has no DistributedDataParallel.buffers\[\].gradient_scaling_factor, which"):
        megatron_names.check_chunks([SimpleNamespace(**{**lists, "buffers": [buffer]})])


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ("import no_such_kernels", "pip install no_such_kernels"),
        ("import megatron.gone", r"pip install 'megatron_ft\[megatron\]'"),
    ],
)
def test_a_library_that_megatron_needs_is_named(tmp_path, monkeypatch, content, remedy):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineError, match=rf"megatron-core cannot be imported \(No module named '.*'\); run: {remedy}"):
        megatron_names.check()


def test_every_name_that_the_engine_imports_is_on_the_list():
    pattern = re.compile(r"^ *from (megatron\.core[\w.]*) import (.+?)(?:  #.*)?$", re.MULTILINE)
    used = set()
    engine = (support.ROOT / "megatron_ft" / "run" / "engines" / "megatron").glob("*.py")
    for path in (*engine, Path(on_cpu.__file__)):
        used |= {
            f"{module}.{name}" for module, names in pattern.findall(path.read_text()) for name in names.split(", ")
        }
    assert len(used) > 5
    listed = megatron_names.NAMES + on_cpu.REPLACED
    assert not {name for name in used if not any(f"{one}.".startswith(f"{name}.") for one in listed)}
