"""Every kind of fault has words in ``inject --dry-run``, a row in docs/fault-injection.md; the examples are valid."""

from __future__ import annotations

import re
from pathlib import Path
from signal import Signals
from types import SimpleNamespace

import pytest

from megatron_ft.cluster.faults.injector import Injector
from megatron_ft.cluster.faults.schedule import _NEEDED, KINDS, Fault, Schedule, load
from megatron_ft.commands import inject_command

ROOT = Path(__file__).parent.parent.parent
FIELDS = {
    "group": 1,
    "groups": (1,),
    "duration_s": 2.0,
    "factor": 3.0,
    "netns": "host1",
    "peer": "10.0.0.2",
    "directory": "/mnt",
}
"""A value for each field that some kind needs."""
EXAMPLES = sorted(path for path in (ROOT / "examples/fault_injection").iterdir() if path.suffix in (".json", ".yaml"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_says_what_the_fault_would_do(kind):
    needed = {name: FIELDS[name] for name in _NEEDED.get(kind, ("group",))}
    table = inject_command._preview(Schedule((Fault(kind=kind, step=3, **needed),)), groups=2, min_survivors=0)
    ((*_, effect, _left),) = table.rows
    assert effect


@pytest.mark.parametrize(
    "number, sent",
    [
        (Signals.SIGKILL, [Signals.SIGKILL]),
        (Signals.SIGSTOP, [Signals.SIGSTOP]),
        (Signals.SIGTERM, [Signals.SIGTERM, Signals.SIGCONT]),
        (Signals.SIGABRT, [Signals.SIGABRT, Signals.SIGCONT]),
    ],
)
def test_a_rank_that_is_frozen_at_a_point_receives_any_signal(number, sent):
    """A stopped process gets most signals only when it continues."""
    received: list[Signals] = []
    Injector._send(SimpleNamespace(_struck=set()), number, [SimpleNamespace(pid=1, send=received.append)])
    assert received == sent


def test_the_documentation_has_a_row_for_every_kind():
    page = (ROOT / "docs/fault-injection.md").read_text(encoding="utf-8")
    table = page.partition("| kind |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(KINDS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid_and_the_readme_names_it(path):
    if path.suffix == ".yaml":
        pytest.importorskip("yaml")
    load(path).check(groups=4, ranks_per_group=1)
    assert f"| `{path.name}` |" in (path.parent / "README.md").read_text(encoding="utf-8")
