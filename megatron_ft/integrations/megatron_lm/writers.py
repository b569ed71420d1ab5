"""What Megatron-LM's loop writes to TensorBoard and wandb, once for the job.

In each group the last rank would make the writers of ``--tensorboard-dir`` and ``--wandb-project``. It gets stand-ins that
collect what they are given. After each iteration, position 0 passes that to ``Session.log``, which records it once, and the
tracker (``report/tracker.py``), of which there is one for the job, makes the writers, with Megatron's names and x values.

Failures it assumes: those of ``Session.log``.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ft.errors import EngineError
from megatron_ft.integrations.megatron_lm import names
from megatron_ft.utils import shared_file

if TYPE_CHECKING:
    from megatron_ft.run.session import Session

MEGATRON_LM = "megatron_lm"
"""The value under which ``Session.log`` records what is collected, and the directory of a run with :data:`ABOUT`."""
ABOUT = "writers.json"
"""With what the writers are made, and what they are given before the first iteration."""


class Writers:
    """One rank's part. Methods with the name of a function of Megatron-LM are called in its place."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._about: dict[str, Any] = {"texts": []}
        self._asked = self._noted = False
        self._new: dict[str, list[tuple[int, dict[str, float]]]] = {"tensorboard": [], "wandb": []}
        self._step, self._told = -1, self._new

    def install(self, loop: Any) -> None:
        """Replace the functions that make writers, and those that log checkpoints as artifacts of wandb. ``loop``: the
        module of Megatron's loop."""
        for name in names.LOGGING:
            setattr(loop, name, partial(self._log, getattr(loop, name), loop))
        for name in names.REPLACED_WRITERS:
            self._set(name, getattr(self, name))
        for name in names.REPLACED_ARTIFACTS:
            setattr(importlib.import_module(names.ARTIFACTS), name, lambda *_, **__: None)

    def _log(self, original: Callable[..., Any], loop: Any, *arguments: Any, **options: Any) -> Any:
        done = original(*arguments, **options)
        self._tell(loop.get_args().curr_iteration + 1)
        return done

    @staticmethod
    def _set(name: str, value: Any) -> None:
        setattr(importlib.import_module(names.WRITERS), name, value)

    def _set_tensorboard_writer(self, args: Any) -> None:
        if getattr(args, "tensorboard_dir", None):
            self._asked = True
            if args.rank == args.world_size - 1:
                directory = os.path.abspath(args.tensorboard_dir)
                self._about["tensorboard"] = {"log_dir": directory, "max_queue": args.tensorboard_queue_size}
                self._set("_GLOBAL_TENSORBOARD_WRITER", _summary_writer(self))

    def _set_wandb_writer(self, args: Any) -> None:
        if getattr(args, "wandb_project", None):
            self._asked = True
            if not args.wandb_exp_name:
                raise ValueError("Please specify the wandb experiment name!")
            if args.rank == args.world_size - 1:
                options = {"project": args.wandb_project, "name": args.wandb_exp_name, "config": dict(vars(args))}
                options["dir"] = os.path.abspath(args.wandb_save_dir or os.path.join(args.save, "wandb"))
                if args.wandb_entity:
                    options["entity"] = args.wandb_entity
                self._about["wandb"] = options
                self._set("_GLOBAL_WANDB_WRITER", _Wandb(self, options["config"]))

    def take(self, writer: str, values: Mapping[str, Any], x: int) -> None:
        """Collect what a writer is given."""
        entries = self._new[writer]
        if not entries or entries[-1][0] != x or entries[-1][1].keys() & values.keys():
            entries.append((x, {}))
        entries[-1][1].update((name, float(value)) for name, value in values.items())

    def take_text(self, *text: Any) -> None:
        self._about["texts"].append(text)

    def _tell(self, iteration: int) -> None:
        """Log what this group's last rank has collected. All ranks of a group call it after the same calls."""
        if not self._asked:
            return
        import torch.distributed as dist

        new, last = [self._new], dist.get_world_size() - 1
        self._new = {name: [] for name in self._new}
        if dist.get_rank() == last and not self._noted:
            self._note()
        if last:
            dist.broadcast_object_list(new, src=last)
        if self._step != self._session.step:  # else both an iteration and evaluations after it have values
            self._step, self._told = self._session.step, {name: [] for name in self._new}
        for name, entries in new[0].items():
            self._told[name] += entries
        if any(self._told.values()):
            self._session.log({MEGATRON_LM: json.dumps({"iteration": iteration, **self._told})})

    def _note(self) -> None:
        """Write what trackers need before the first values. The groups that begin the run write the same; one that comes
        back writes nothing."""
        self._noted = True
        path = self._session.env.run_dir / MEGATRON_LM / ABOUT
        if not path.is_file():
            shared_file.make_directory(path.parent)
            shared_file.write(path, json.dumps(self._about, default=str), mode=0o644)


def _summary_writer(writers: Writers) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    class Summaries(SummaryWriter):
        """In the place of Megatron's, which has no file."""

        file_writer = all_writers = None

        def __init__(self) -> None:
            """Make no file."""

        def add_scalar(self, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> None:
            writers.take("tensorboard", {tag: scalar_value}, global_step)

        def add_text(self, tag: Any, text_string: Any, global_step: Any = None, walltime: Any = None) -> None:
            writers.take_text(tag, text_string, global_step)

    for name in dir(SummaryWriter):
        if name.startswith("add_") and name not in vars(Summaries):
            setattr(Summaries, name, partial(_refuse, name))
    return Summaries()


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise EngineError(f"SummaryWriter.{name} is not supported: the run records add_scalar and add_text; leave it out")


class _Wandb:
    """In the place of the module ``wandb``, which it equals: Megatron's timers ask for that."""

    def __init__(self, writers: Writers, config: dict[str, Any]) -> None:
        self._writers, self.config = writers, config

    def __eq__(self, other: object) -> bool:
        return getattr(other, "__name__", None) == "wandb"

    __hash__ = None  # type: ignore[assignment]  # it equals a module that it has not imported

    def log(self, values: Mapping[str, Any], step: int, *_: Any, **__: Any) -> None:
        self._writers.take("wandb", values, step)

    def finish(self, *_: Any, **__: Any) -> None:
        """Do nothing: the tracker ends with the run."""
