"""What ``--help`` says is true: the examples of every command are accepted by its parser."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from megatron_ft import cli
from megatron_ft.errors import ConfigError
from megatron_ft.utils import extras, shipped_files, torch_private
from tests import support

PARSER = cli._parser()
COMMANDS = next(action.choices for action in PARSER._actions if isinstance(action.choices, dict))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_describes_it_and_its_examples_are_accepted(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = COMMANDS[name]
    text = command.format_help()
    examples = re.findall(rf"^  megatron-ft ({name}.*)", command.epilog, re.MULTILINE)
    assert examples and "exit codes" in text and command.description.endswith(".")
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        assert cli._parse(words).command == name
        if "launch" in words[1:]:
            assert cli._parse(words[words.index("launch") :]).command == "launch"


def test_the_page_of_commands_has_every_command():
    page = (support.ROOT / "docs" / "commands.md").read_text()
    assert COMMANDS.keys() <= set(re.findall(r"megatron-ft ([\w-]+)", page))


def test_the_exit_codes_of_help_and_documents_are_the_same():
    documented = (support.ROOT / "docs" / "run-record.md").read_text().partition("### Exit codes")[2]
    table = set(re.findall(r"^\| ([\d+n ]+?) \|", documented.partition("###")[0], re.MULTILINE))
    shown = set(re.findall(r"^  ([\d+n]+) ", COMMANDS["launch"].epilog, re.MULTILINE))
    assert {code.replace(" ", "") for code in table} == shown


def test_completion_knows_every_command_and_is_accepted_by_the_shell(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(support.ft("completion", "bash").stdout)
    asked = f"source {script}; COMP_WORDS=(megatron-ft lau); COMP_CWORD=1; _shtab_megatron_ft; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["launch"]


def test_the_shipped_files_are_copied_into_a_new_directory_only(tmp_path):
    target = tmp_path / "ft"
    assert support.ft("examples", "--copy", target).returncode == 0
    assert {path.name for path in target.iterdir()} == set(shipped_files.NAMES)
    again = support.ft("examples", "--copy", target)
    assert again.returncode == 2 and "name a new one" in again.stderr


def test_a_missing_library_is_named_with_the_command_that_installs_it():
    message = r"ortools is not installed here; run: pip install 'megatron_ft\[train\]'"
    with pytest.raises(ConfigError, match=message), extras.needed():
        raise ModuleNotFoundError("No module named 'ortools.graph'", name="ortools.graph")
    with pytest.raises(ModuleNotFoundError), extras.needed():
        raise ModuleNotFoundError("No module named 'mine'", name="mine")


def test_a_torch_without_a_private_name_is_refused():
    torch_private.check()
    with pytest.raises(ConfigError, match="has no torch.nn._Gone, torch.gone._x, which megatron_ft uses"):
        torch_private.check(("torch.nn._Gone", "torch.gone._x", "torch.Tensor._version"))


def test_every_private_name_of_torch_is_on_the_list():
    pattern = re.compile(r"(?:torch|dist)(?:\.[A-Za-z]\w*)*\.(_[A-Za-z]\w*)|from torch[\w.]* import (_[A-Za-z]\w*)")
    used = set()
    for path in (support.ROOT / "megatron_ft").rglob("*.py"):
        used |= {first or second for first, second in pattern.findall(path.read_text())}
    used -= {"_dynamo"}  # imported early where it exists
    listed = {word for name in torch_private.NAMES for word in name.split(".") if word.startswith("_")}
    assert used <= listed, used - listed
