"""The names in the documentation exist: files, modules and their attributes, settings; and its configs are valid."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from megatron_ft.config import schema
from megatron_ft.core.protocol import messages, signals
from megatron_ft.record import history
from megatron_ft.run import orders

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "megatron_ft"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        ROOT / "slurm" / "README.md",
    ]
)
PACKAGES = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}
MODULES = {path.stem: path for path in PACKAGE.rglob("*.py") if path.stem != "session"}  # the object of a script
NAMES = {path.name for path in PACKAGE.rglob("*.py")}  # no two modules have the same name
NAMES |= {f"{path.name}/" for path in PACKAGE.rglob("*") if path.is_dir()}
SETTINGS = {"checkpoint.directory", "data.batch"}  # of the config, and of DeepSpeed's engine
PARTS = ("detector", "checkpoint", "rejoin")


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Return the text without code blocks."""
    return re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)


def quoted(page: Path) -> set[str]:
    """Return the texts between backticks, without arguments of a call."""
    return {token.partition("(")[0] for token in re.findall(r"`([^`\n]+)`", prose(page))}


def broken_links(page):
    targets = [
        target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in target
    ]
    return [target for target in targets if target and not (page.parent / target).exists()]


def missing_files(page):
    """A path is relative to the repository, to the package or to the page. One with a placeholder names no single file."""
    paths = {token for token in quoted(page) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(\.(py|sbatch)|/)", token)}
    places = (ROOT, PACKAGE, page.parent)
    paths -= NAMES
    written = {
        "array/",
        "store/",
        "logs/",
        "agents/",
        "timeline/",
        "runs/",
        "train.py",
        "pretrain_gpt.py",
    }  # of a run or a user
    return [path for path in sorted(paths - written) if not any((place / path).exists() for place in places)]


def test_the_caption_of_the_first_picture_says_what_its_record_says():
    """``make pictures`` brings another record, and then another caption is due."""
    caption = re.search(r"!\[([^\]]*)\]\(docs/images/demo-timeline.png\)", text_of(ROOT / "README.md"))
    said = re.findall(r"roup (\d+) is lost in step (\d+) and back in step (\d+)", " ".join(caption[1].split()))
    views = [line for line in history.lines(ROOT / "docs" / "images" / "demo") if line["event"] == "view"]
    lost = {group: view["step"] for view in views for group in map(int, view["lost"])}
    back = {group: view["step"] for view in views for group in view["joined"]}
    assert sorted(tuple(map(int, numbers)) for numbers in said) == [
        (group, lost[group], back[group]) for group in sorted(lost)
    ]


def missing_modules(page):
    names = {token for token in quoted(page) if re.fullmatch(r"(megatron_ft\.)?\w+(\.\w+)+", token)}
    missing = []
    for name in sorted(names):
        parts = name.removeprefix("megatron_ft.").split(".")
        if parts[-1] in ("py", "json", "jsonl", "lock", "md") or (parts[0] in PARTS and parts[1].islower()):
            continue  # a file, or a setting
        if parts[0] in schema.USED_ENGINE_KEYS | schema.ENGINE_KEYS:
            continue  # a setting of DeepSpeed's
        if parts[0] in MODULES and parts[0] not in PACKAGES:
            parts[:1] = MODULES[parts[0]].relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in PACKAGES and not resolves(parts):
            missing.append(name)
    return missing


SOURCES = sorted(path for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py"))
DEEPSPEED = PACKAGE / "run" / "engines" / "deepspeed"  # imports a package ``runtime`` of DeepSpeed's


def test_docstrings_and_comments_name_modules_that_exist():
    assert {path.relative_to(ROOT): found for path in SOURCES if (found := gone(path))} == {}


def gone(source):
    """Return what a source names and does not exist: ``runtime`` and ``bootstrap.py``, say."""
    text = text_of(source)
    names = set(re.findall(r"``(?:megatron_ft\.)?(\w+(?:\.\w+)+)", text)) - {"config.json"}
    of_the_package = [name.split(".") for name in names if name.split(".")[0] in PACKAGES and name not in SETTINGS]
    found = [".".join(name) for name in of_the_package if not resolves(name)]
    if source.parent != DEEPSPEED and source != Path(__file__):
        found += re.findall(r"(?<![\w.])runtime\.[a-z]\w*", text)
    named = re.findall(r"""with_name\("(\w+\.py)"\)""", text)
    return found + [name for name in named if not source.with_name(name).exists()]


def resolves(parts: list[str]) -> bool:
    """Return whether ``core.protocol.signals.EpochAborted``, without the package's own name, can be imported."""
    found, rest = importlib.import_module("megatron_ft"), list(parts)
    dotted = "megatron_ft"
    while rest:
        dotted = f"{dotted}.{rest[0]}"
        path = ROOT / Path(*dotted.split("."))
        if not (path.is_dir() or path.with_suffix(".py").exists()):
            break
        found = importlib.import_module(dotted)
        rest.pop(0)
    for name in rest:
        known = {field.name for field in fields(found)} if is_dataclass(found) else set()
        if not hasattr(found, name) and name not in known:
            return False
        found = getattr(found, name, None)
    return len(rest) < len(parts)


@cache
def settings_of(section: type) -> dict[str, dict]:
    """Map each key to the keys below it."""
    found = {}
    for field in fields(section):
        below = getattr(schema, f"{field.name.capitalize()}Config", None)
        found[field.name] = settings_of(below) if below is not None else {}
    return found


def unknown_settings(page):
    known = settings_of(schema.FaultToleranceConfig)
    unknown = []
    for token in sorted(quoted(page)):
        parts = token.removeprefix("fault_tolerance.").partition(":")[0].split(".")
        if token.startswith("fault_tolerance.") and parts[0] not in known:
            unknown.append(token)
        setting = parts[0] in PARTS and len(parts) == 2 and parts[1].islower() and parts[1] != "py"
        if setting and parts[1] not in known[parts[0]]:
            unknown.append(token)
    return unknown


@pytest.mark.parametrize("missing", [broken_links, missing_files, missing_modules, unknown_settings])
def test_what_a_page_names_exists(missing):
    assert {page.relative_to(ROOT): found for page in PAGES if (found := missing(page))} == {}


def test_configs_are_valid():
    """Every example with a ``fault_tolerance`` section is valid; one may be part of a config, without the outer
    braces."""
    blocks = [block for page in PAGES for block in re.findall(r"```json\n(.*?)```", text_of(page), flags=re.DOTALL)]
    for block in blocks:
        raw = json.loads(block if block.lstrip().startswith("{") else f"{{{block}}}")
        if "fault_tolerance" in raw:
            section = {
                key: value for key, value in raw["fault_tolerance"].items() if key != "model"
            }  # the model may be in a file of its own
            schema.resolve({**raw, "fault_tolerance": section}, groups=4)


def test_the_table_of_packages_names_each_package_once_and_modules_where_they_are():
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", text_of(ROOT / "docs" / "architecture.md"), flags=re.MULTILINE)
    packages = [name for row, _ in rows for name in re.findall(r"`([\w/.]+)`", row) if (PACKAGE / name).exists()]
    top = {f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.iterdir()} - {
        "__pycache__/",
        "__init__.py",
        "py.typed",
    }
    assert sorted(name for name in packages if name.count("/") < 2 and not name.startswith("core/")) == sorted(
        top - {"core/"}
    )
    missing = []
    for row, text in rows:
        places = [PACKAGE / name for name in re.findall(r"`([\w/.]+)`", row) if (PACKAGE / name).exists()]
        named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
        missing += [name for name in named if places and not any((place / name).exists() for place in places)]
    assert missing == []


def test_the_table_of_messages_names_every_message():
    table = text_of(ROOT / "docs" / "architecture.md").partition("\n## Messages\n")[2]
    named = set(re.findall(r"`(\w+)`", table))
    unions = (messages.Event, messages.Action, signals.Signal)
    known = {kind.__name__ for union in unions for kind in get_args(union)}
    assert sorted((known | orders._ORDERS.keys()) - named) == []
