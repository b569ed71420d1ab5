"""Errors a user can cause and cure.

Every message names the value, the rule and the remedy, and is printed as one line without a traceback (``cli.main`` and
``launch.bootstrap`` are the only places that catch :class:`FTError`). A dead peer is never one of these: it is an
event.
Bugs of ours are plain ``AssertionError``/``RuntimeError`` and keep their traceback.
"""


class FTError(Exception):
    """Base of everything the user can do something about. ``exit_code`` is what the process exits with."""

    exit_code = 2


class ConfigError(FTError):
    """The configuration is unknown, out of range or contradicts itself."""


class DataError(FTError):
    """The corpus, tokenizer or packed dataset is missing, empty, damaged or does not fit the request."""


class LaunchError(FTError):
    """The run cannot be started as asked: run directory, port, script, number of ranks."""


class EngineError(FTError):
    """The model or optimizer handed to an engine cannot be used by it."""


class StoreError(FTError):
    """The control store is gone or is not the one of this run."""

    exit_code = 4


class CheckpointError(FTError):
    """A checkpoint cannot be written, found or read, or another job uses its directory."""


class RunStopped(FTError):
    """This group cannot or must not go on: it is outside the view, or fewer than ``min_groups`` are left."""

    exit_code = 3


class StartOver(RunStopped):
    """This group came back and cannot go on from what it has received; its next start can. ``launch`` sees to that."""

    exit_code = 6


class GroupLeft(RunStopped):
    """This group has left in order, as it was told to; what it did until then counts."""

    exit_code = 5


WIPED_OUT = 7
"""What the launcher exits with when no group is left, the last of them taken down from outside: start again."""
