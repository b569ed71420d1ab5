"""Every case file in this folder prints what it says; README.md describes the files."""

from itertools import chain
from pathlib import Path

import pytest

from tests.golden.interpreter import WORLDS, CaseError, commands, rewritten, usage

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_case(path, request):
    text = path.read_text()
    now = rewritten(f"tests/golden/{path.name}", text)
    if request.config.getoption("rewrite", default=False):
        path.write_text(now)
    else:
        assert now == text, "read the difference; `python -m pytest tests/golden --rewrite` accepts it"


def test_output_is_added_to_a_case_that_has_only_commands():
    text = rewritten("new.txt", "# Nothing fails.\ngroups 2 buckets=1 steps=1\n\nrun\nend\n")
    assert text.startswith("# Nothing fails.\ngroups 2 buckets=1 steps=1\n\nrun\nend\n----\n0 computes 0/0.0\n")
    assert rewritten("new.txt", text) == text


@pytest.mark.parametrize(
    "text, words",
    [
        ("kill 3\nend", "x.txt:1: `kill 3`: there is no such command here; a case begins with one of:\n  groups COUNT"),
        (
            "# A word is wrong.\n\ngroups 4\n\nkil 3\n",
            "x.txt:5: `kil 3`: there is no such command here; the commands are:",
        ),
        ("groups 4 policy=magic\nend\n", "x.txt:1: `groups 4 policy=magic`: there is no policy magic here; policies: "),
        ("groups 4\nkill\n", "x.txt:2: `kill`: missing a required argument: 'group'; usage: kill GROUP...: "),
        ("groups 4\nkill 7\n", "x.txt:2: `kill 7`: there is no live group 7; live: 0 1 2 3"),
        ("groups 4\nuntil written 1\n", "x.txt:2: `until written 1`: nothing moves any more"),
        ("groups 4\nreduce bucket 2 at 0\n", "x.txt:2: `reduce bucket 2 at 0`: group 0"),
        ("groups 4\nend\n", "x.txt:2: `end`: group 0 is stuck in Compute"),
        ("groups 4\nrun\n", "x.txt:2: the last command is `run`, it has to be `end`"),
        (
            "hosts 3\nat 5 host burns\n",
            "x.txt:2: `at 5 host burns`: there is no fault 'host burns'; faults: abort hangs, accuse, ",
        ),
    ],
)
def test_a_wrong_case_is_refused_with_its_line_and_what_is_right(text, words):
    with pytest.raises(CaseError) as found:
        rewritten("x.txt", text)
    assert str(found.value).startswith(words)


def test_the_readme_lists_every_command_as_the_interpreter_describes_it():
    readme = " ".join((HERE / "README.md").read_text().split())
    for command in chain(WORLDS.values(), *(commands(world).values() for world in WORLDS.values())):
        words, what = usage(command).split(": ", 1)
        assert f"- `{words}`: {what}" in readme
