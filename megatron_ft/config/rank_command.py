"""The command of a rank: a script with its arguments, or a module, after ``-m`` as Python has it.

Failures it assumes: there is no such script or module; :func:`check` says so before any process is started.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from megatron_ft.errors import LaunchError

MODULE = "-m"
_LOOP = re.compile(r"^\s*(from|import)\s+megatron\.training\b", re.MULTILINE)
_MEGATRON_LM = [MODULE, "megatron_ft.integrations.megatron_lm.script"]


def of(what: str, arguments: Sequence[str], *, module: bool = False, megatron_lm: bool = False) -> list[str]:
    """Return the command that runs ``what``, the path of a script or with ``module`` the name of a module. With
    ``megatron_lm`` the script is one of Megatron-LM, unchanged."""
    return [*(_MEGATRON_LM if megatron_lm else [MODULE] if module else []), what, *arguments]


def launch_words(command: Sequence[str]) -> list[str]:
    """Return the last arguments of the ``megatron-ft launch`` that has this command, whichever options it had."""
    module = command[0] == MODULE
    return [MODULE, "--", *command[1:]] if module else ["--", *command]


def shown(command: Sequence[str]) -> str:
    """Return the name of the script or module for messages and titles."""
    script = _script(command)
    return command[1] if script is None else Path(script).name


def file_of(command: Sequence[str]) -> str | None:
    """Return the file whose lines are the user's own; None for a module that is not found."""
    script = _script(command)
    if script is not None:
        return script
    found = _spec(command[1])
    return None if found is None else found.origin


def check(command: Sequence[str]) -> None:
    """Raise ``LaunchError`` if there is no such script or module."""
    script = _script(command)
    if script is not None:
        if not Path(script).is_file():
            raise LaunchError(f"script {script} does not exist; give the path of a Python file")
        if command[0] != MODULE and _is_of_megatron_lm(Path(script)):
            raise LaunchError(
                f"script {script} uses Megatron-LM's training loop (megatron.training) and not megatron_ft, so each rank "
                f"would train the whole job alone; start it with launch --megatron-lm"
            )
    elif _spec(command[1]) is None:
        raise LaunchError(
            f"module {command[1]} is neither in this directory, nor in PYTHONPATH, nor installed for {sys.executable}, or "
            f"it is a package without a module __main__; correct the name, or set PYTHONPATH"
        )


def _is_of_megatron_lm(script: Path) -> bool:
    text = script.read_text(encoding="utf-8", errors="replace")
    return _LOOP.search(text) is not None and "megatron_ft" not in text


def _script(command: Sequence[str]) -> str | None:
    if list(command[:2]) == _MEGATRON_LM:
        return "".join(command[2:3])
    return None if command[0] == MODULE else command[0]


def _spec(name: str) -> ModuleSpec | None:
    """Find a module, that of a package's ``__main__`` for a package, without importing the packages that it is in: they may
    take minutes, or a GPU."""
    path: Sequence[str] | None = [os.getcwd(), *sys.path]
    words, found = name.split("."), None
    try:
        for count in range(len(words)):
            found = None if path is None else _find(".".join(words[: count + 1]), path)
            if found is None:
                return None
            path = found.submodule_search_locations
        return found if path is None else _find(f"{name}.__main__", path)
    except KeyError:  # a directory without __init__.py inside another one, which Python itself asks for its path
        return importlib.util.find_spec(name)


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    return next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
