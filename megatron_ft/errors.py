"""Errors that a user can cause and cure.

Every message names the value, the rule and the remedy, and is printed as one line without a traceback (``cli.main``,
``host.rank_bootstrap`` and ``utils.vital_thread`` are the only places that catch :class:`FTError`). A dead peer is an
event, never an error of this module. Bugs of megatron_ft are plain ``AssertionError``/``RuntimeError`` and keep their
traceback.
"""


class FTError(Exception):
    """The base of all errors that a user can cure. ``exit_code`` is the exit code of the process."""

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


class WipedOut(RunStopped):
    """The living groups cannot finish the step under the run's policy: the job goes on from its newest checkpoint."""

    exit_code = 7


class StartOver(RunStopped):
    """This group came back and cannot go on from the state it has received; ``launch`` starts it again."""

    exit_code = 6


class InvariantBroken(RunStopped):
    """An invariant is broken, and no group can be accused of it: the whole run stops, and no lost group is replaced.

    An example: the groups' states differ, and no state is held by most of them.
    """

    exit_code = 10


class GroupLeft(RunStopped):
    """This group has left in order, as it was told to; its work until then counts."""

    exit_code = 5


NOT_SAVED = 8
"""Exit code of the launcher when all steps are done, but the checkpoint after the last step was not written, or the
script failed or was stopped after them, for example while it wrote its final model: an exception, an exit code, a
signal, also one to the launcher."""
WIPED_OUT = WipedOut.exit_code
"""Exit code of the launcher when the job starts again from its newest checkpoint (``core.lifecycle.run_ending``)."""
