"""What becomes of the arguments of an unchanged script of Megatron-LM: most are taken as they are, some are changed or left
out because this layer does what they ask for or cannot do it yet, some are refused.

:data:`CHANGED` and :data:`REFUSED` are the whole list; docs/megatron-lm.md shows it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.errors import ConfigError

NEWEST = "latest_checkpointed_iteration.txt"
"""The file in a directory of Megatron's checkpoints that names the newest complete one."""
_ALL = -1
"""Number of values of an argument that takes all words up to the next argument."""
_STEP = "gradients are summed over the groups when a step is committed"
_ENDS = "a signal to the launcher, or `megatron-ft stop`, makes a script with --save and --load save and end"
_MASKED = "the run itself masks failures and judges ranks that hang"
_GRAPHS = "passes are made one by one"
_INJECTED = "`megatron-ft inject` injects faults"
_FILES = "the ranks of all groups would write the same files"
_MICROBATCHES = "groups compute different microbatches"
CHANGED = {
    "--align-grad-reduce": (0, _STEP),
    "--calc-ft-timeouts": (0, _MASKED),
    "--check-for-large-grads": (0, "verify in the config finds steps that were computed wrongly"),
    "--check-for-nan-in-loss-and-grad": (0, "the loss and norm of the whole step are checked"),
    "--check-for-spiky-loss": (0, "verify in the config finds steps that were computed wrongly"),
    "--cuda-graph-impl": (1, _GRAPHS),
    "--cuda-graph-scope": (_ALL, _GRAPHS),
    "--ddp-average-in-collective": (0, "gradients are summed, and then divided"),
    "--defer-embedding-wgrad-compute": (0, "gradients are complete when a backward pass ends"),
    "--delay-wgrad-compute": (0, "gradients are complete when a backward pass ends"),
    "--enable-cuda-graph": (0, _GRAPHS),
    "--enable-ft-package": (0, _MASKED),
    "--error-injection-rate": (1, _INJECTED),
    "--error-injection-type": (1, _INJECTED),
    "--exit-signal": (1, _ENDS),
    "--exit-signal-handler": (0, _ENDS),
    "--exit-signal-handler-for-dataloader": (0, _ENDS),
    "--exit-signal-handler-for-training": (0, _ENDS),
    "--external-cuda-graph": (0, _GRAPHS),
    "--inprocess-restart": (0, _MASKED),
    "--log-energy": (0, "it would be that of one group"),
    "--log-max-attention-logit": (0, "it is not reported"),
    "--log-num-zeros-in-grad": (0, "it is not reported"),
    "--log-progress": (0, "history.jsonl in the run directory has the progress of the job"),
    "--log-straggler": (0, "the run itself finds slow groups: detector.straggler_factor in the config"),
    "--no-check-for-nan-in-loss-and-grad": (0, ""),
    "--num-workers": (1, "each rank reads its samples ahead in a thread"),
    "--optimizer-cuda-graph": (0, _GRAPHS),
    "--overlap-grad-reduce": (0, _STEP),
    "--overlap-moe-expert-parallel-comm": (0, "passes are made one after the other"),
    "--overlap-param-gather-with-optimizer-step": (0, "parameters are gathered in the next forward pass"),
    "--record-memory-history": (0, _FILES),
    "--rerun-mode": (
        1,
        "a step is computed by all groups; verify in the config finds steps that were computed wrongly",
    ),
    "--result-rejected-tracker-filename": (1, "verify in the config finds steps that were computed wrongly"),
    "--reuse-grad-buf-for-mxfp8-param-ag": (0, "gradients have memory of their own"),
    "--run-workload-inspector-server": (0, "ranks of several groups would ask for the same port"),
    "--use-pytorch-profiler": (0, _FILES),
}
"""Argument -> number of its values, and why it is left out; without a reason it says nothing."""
REFUSED = {
    "--adlr-autoresume": (0, None, "it ends jobs by itself", "leave it out"),
    "--ckpt-convert-format": (1, None, "a conversion is no training", "run it without megatron-ft"),
    "--data-parallel-sharding-strategy": (1, None, "it belongs to FSDP", "use --use-distributed-optimizer"),
    "--dataloader-type": (1, ("single",), "ranks end an epoch at different times, or read by themselves", "use single"),
    "--decrease-batch-size-if-needed": (0, None, "a batch keeps its size", "leave it out"),
    "--fake-process-group": (0, None, "nothing would be summed", "leave it out"),
    "--fault-injector-num-ranks": (1, None, "all groups would fail at once", "use `megatron-ft inject`"),
    "--fault-injector-ranks": (1, None, "all groups would fail at once", "use `megatron-ft inject`"),
    "--freeze-all-layers": (0, None, "nothing is trained", "run it without megatron-ft"),
    "--full-validation": (0, None, "groups share a fixed number of iterations", "set --eval-iters"),
    "--hybrid-context-parallel": (0, None, "its batches depend on the rank", "use --context-parallel-size"),
    "--logits-load-dir": (
        1,
        None,
        "files belong to a data-parallel rank of the whole job",
        "run it without megatron-ft",
    ),
    "--logits-save-dir": (
        1,
        None,
        "files belong to a data-parallel rank of the whole job",
        "run it without megatron-ft",
    ),
    "--moe-routing-trace-path": (1, None, _MICROBATCHES, "leave it out"),
    "--moe-use-upcycling": (0, None, "a conversion is no training", "run it without megatron-ft first"),
    "--non-persistent-ckpt-type": (1, None, "it needs all ranks of the job", "set checkpoint.directory in the config"),
    "--non-persistent-save-interval": (
        1,
        None,
        "it needs all ranks of the job",
        "set checkpoint.directory in the config",
    ),
    "--num-distributed-optimizer-instances": (1, ("1",), "groups are the instances", "leave it out"),
    "--perform-rl-step": (0, None, "rollouts differ between groups", "leave it out"),
    "--phase-transition-iterations": (_ALL, None, "data begin anew at each", "start a run for each phase"),
    "--qk-clip": (0, None, "it changes weights after the optimizer's step", "leave it out"),
    "--save-activations-interval": (1, None, _MICROBATCHES, "leave it out"),
    "--save-dgrads-interval": (1, None, _MICROBATCHES, "leave it out"),
    "--save-params-interval": (1, None, "each group would write them", "use --save-interval"),
    "--save-tokens-per-expert-interval": (1, None, _MICROBATCHES, "leave it out"),
    "--save-wgrads-interval": (1, None, _MICROBATCHES, "leave it out"),
    "--skip-train": (0, None, "nothing is trained", "run it without megatron-ft"),
    "--tensor-parallel-num-weight-shards": (1, ("1",), "ranks share data in another way", "leave it out"),
    "--use-custom-fsdp": (0, None, "its shards are no buffers of Megatron", "use --use-distributed-optimizer"),
    "--use-megatron-fsdp": (0, None, "its shards are no buffers of Megatron", "use --use-distributed-optimizer"),
    "--use-mp-args-from-checkpoint-args": (0, None, "sizes are read from the arguments", "give them as arguments"),
    "--use-torch-fsdp2": (0, None, "its shards are no buffers of Megatron", "use --use-distributed-optimizer"),
    "--use-tp-pp-dp-mapping": (0, None, "pipeline stages are the outermost division of a group", "leave it out"),
    "--yaml-cfg": (1, None, "it replaces the arguments of which sizes are read", "give arguments"),
}
"""Argument -> number of its values, values that are allowed, why it is refused, and what to do instead."""
_BACKEND, _ITERATIONS, _SAMPLES = "--distributed-backend", "--train-iters", "--train-samples"
_TENSORBOARD = "--tensorboard-dir"
_BATCH, _SCHEDULE, _EVALUATED = "--global-batch-size", "--step-batch-size-schedule", "--eval-global-batch-size"
_GATHER, _WITH_GATHER = "--overlap-param-gather", ("--overlap-grad-reduce", "--no-align-param-gather")
"""An argument with which Megatron asks for the first one of the others; the engine turns that off. Without the second
one, virtual stages would gather in each run of a schedule, of which a step may have several."""
_APPENDED = ("--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled", "--no-one-logger")


@dataclass(frozen=True)
class Changed:
    """What :func:`changed` returns.

    Args:
        words: the arguments with which the script runs.
        notes: what was left out, and why, a line for each.
        checks_nan: whether a loss or norm that is not finite ends the run.
        missing: the argument that they lack, and whose default would be the batch of one group; None: none.
        backend: of ``torch.distributed``; None: Megatron's default.
    """

    words: list[str]
    notes: list[str]
    checks_nan: bool
    missing: str | None
    backend: str | None


def newest(directory: str) -> str:
    """Return the iteration of the newest checkpoint in a directory of Megatron's; "" where there is none."""
    try:
        return Path(directory, NEWEST).read_text(encoding="utf-8").strip() if directory else ""
    except (OSError, ValueError):
        return ""


def done(words: Sequence[str], directory: str) -> int | None:
    """Return the number of iterations if all of them are saved in ``directory``; else None, and where a schedule of batch
    sizes decides how many iterations ``--train-samples`` are."""
    found = newest(directory)
    asked = {name: values[0] for name, values in _arguments(words) if values and values[0].isdecimal()}
    last, samples, batch = (int(asked.get(name, 0)) for name in (_ITERATIONS, _SAMPLES, _BATCH))
    if not last and batch:
        last = samples // batch
    return int(found) if found.isdecimal() and last and int(found) >= last else None


def check_directory(words: Sequence[str]) -> None:
    """Raise ``ConfigError`` if no file can be made in the directory of ``--tensorboard-dir``: nothing would be logged."""
    for directory in (values[0] for name, values in _arguments(words) if name == _TENSORBOARD and values):
        try:
            os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f"{_TENSORBOARD} {directory}: {error}; name one that can be written to") from None


def changed(words: Sequence[str]) -> Changed:
    """Return the arguments with which an unchanged script runs. Raises ``ConfigError`` for one that is refused."""
    kept: list[str] = []
    notes: list[str] = []
    checks_nan = True
    for name, values in _arguments(words):
        if name in REFUSED:
            _, allowed, why, remedy = REFUSED[name]
            if allowed is None or tuple(values) != allowed:
                shown = " ".join((name, *values))
                raise ConfigError(f"{shown} is not supported with --megatron-lm: {why}; {remedy}")
        if name in CHANGED:
            checks_nan = checks_nan and name != "--no-check-for-nan-in-loss-and-grad"
            if why := CHANGED[name][1]:
                notes.append(f"{name} is left out: {why}")
            continue
        kept += [name, *values]
    backend = next(iter(kept[kept.index(_BACKEND) + 1 :]), None) if _BACKEND in kept else None
    more = _WITH_GATHER if _GATHER in kept else ()
    return Changed([*kept, *more, *_APPENDED], notes, checks_nan, _missing(kept), backend)


def _missing(words: Sequence[str]) -> str | None:
    if _SCHEDULE in words:
        return None if _EVALUATED in words else _EVALUATED
    return None if _BATCH in words else _BATCH


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each argument with its values; words that are values of another argument come with an empty list."""
    left_out = {name: count for name, (count, _) in CHANGED.items()}
    counts = left_out | {name: count for name, (count, *_) in REFUSED.items()}
    counts |= dict.fromkeys((_ITERATIONS, _SAMPLES, _BATCH, _TENSORBOARD), 1)
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        count = counts.get(name, 0)
        if equals:
            yield (name, [value]) if count else (f"{name}={value}", [])
            continue
        values: list[str] = []
        while rest and (len(values) < count or count == _ALL) and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        yield name, values
