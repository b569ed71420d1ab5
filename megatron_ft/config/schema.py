"""The ``"fault_tolerance"`` section of a DeepSpeed-style JSON config, and the run that it describes.

The section is typed, frozen, and validated once, before any process starts: :func:`load` raises ``ConfigError``, with
the value, the rule and the remedy, for an unknown key, a value of the wrong type or out of range, and settings that
contradict each other. An explicit value always takes precedence over the environment. Keys outside the section belong
to the engine: DeepSpeed gets them, and the torch-native engine names them in a warning.

Keys that end with ``_s`` are in seconds, with ``_gb`` in 10^9 bytes, with ``_mb`` in MiB. The docstrings below the fields
are what users read: ``python -m tools.settings`` writes docs/settings.md from them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ft import codec
from megatron_ft.config import parallelism, settings_file, store_address
from megatron_ft.config.validators import (
    AUTO,
    POSITIVE,
    STRING,
    TRUE_OR_FALSE,
    Auto,
    Rule,
    check,
    is_number,
    nearest,
    number,
    one_of,
    or_auto,
    setting,
    whole_number,
)
from megatron_ft.core.detection import collective_stalls
from megatron_ft.core.exactness import grid, verification
from megatron_ft.core.protocol.state import Job
from megatron_ft.core.replication import placement as replication
from megatron_ft.core.scheduling import policies
from megatron_ft.errors import ConfigError
from megatron_ft.types import Microbatch, listed

_MOST_VERIFIED = 16
EMBEDDED = "embedded"
"""Value of ``store`` beside the address of an etcd (``store_address``)."""
STORE_WORDS = (EMBEDDED, AUTO, "etcd")
"""The words that ``store`` may be or was: "auto" is the embedded store, and "etcd" is refused."""

USED_ENGINE_KEYS = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    fault_tolerance""".split()
)
ENGINE_KEYS = frozenset(
    """optimizer scheduler fp16 bf16 amp zero_optimization zero_allow_untested_optimizer steps_per_print
    wall_clock_breakdown dump_state prescale_gradients gradient_predivide_factor sparse_gradients
    communication_data_type activation_checkpointing flops_profiler comms_logger tensorboard wandb csv_monitor
    monitor_config aio autotuning data_types data_efficiency curriculum_learning elasticity pipeline
    compression_training checkpoint tensor_parallel memory_breakdown seed disable_allgather sparse_attention""".split()
)
"""Keys of DeepSpeed that only DeepSpeed acts on."""


def _model(name: str, value: Any) -> dict[str, Any]:
    """Accept a JSON object, or the path of such a file, relative to the config."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {value!r}; it must be a JSON object like Hugging Face's config.json, or the path of such a file"
        )
    return dict(value)


def _domains_or_auto(name: str, value: Any) -> tuple[str, ...] | tuple[int, ...] | Auto:
    """Accept "auto" or a list with an entry for each group, all strings or all whole numbers."""
    if value == AUTO:
        return AUTO
    rule = f'it must be "{AUTO}" or a list with the failure domain (e.g. rack) of each group'
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}; {rule}")
    kinds = {type(domain) for domain in value}
    if not (kinds <= {str} or kinds <= {int}):  # 1 and "1" would silently be two racks
        raise ConfigError(f"{name} is {value!r}; {rule}, all of them strings or all of them whole numbers")
    return tuple(value)


def store_setting(name: str, value: Any) -> str:
    """Accept "embedded" ("auto" is the same), "etcd://HOST:PORT,..." or "etcds://HOST:PORT,..."."""
    text: str = STRING(name, value)
    if text in (AUTO, EMBEDDED):
        return EMBEDDED
    if text == "etcd":
        raise ConfigError(
            f'{name} is "etcd", but a run starts no etcd of its own any more; leave it out for the embedded store, which '
            f"survives the same losses, or give {store_address.RULE}"
        )
    if "://" not in text:
        raise ConfigError(f'{name} is {value!r}; it must be "{EMBEDDED}" or {store_address.RULE}')
    try:
        store_address.EtcdAddress.parse(value)
    except ValueError as error:
        shown = re.sub(r"password=[^&]*", "password=...", value)
        raise ConfigError(f"{name} is {shown!r}{error}") from None
    return text


def _microbatches(name: str, value: Any) -> tuple[str, ...]:
    """Accept a list of microbatches STEP/SHARD.INDEX, such as ``["120/3.0"]``."""
    rule = (
        'it must be a list of microbatches STEP/SHARD.INDEX, such as ["120/3.0"], as the message of the run names them'
    )
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}; {rule}")
    try:
        return tuple(str(Microbatch.parse(text)) for text in value)
    except (ValueError, AttributeError):
        raise ConfigError(f"{name} is {value!r}; {rule}") from None


_COUNT_OR_SLACK = Rule(
    f'a whole number >= 0, or "{verification.SLACK}"',
    lambda value: value == verification.SLACK or whole_number(0).accepts(value),
)
COMMUNICATORS = ("nccl", "gloo")
"""Communicators between groups, in the order of preference (``run.collectives.communicator_choice``)."""
_GONE = ("staged", "reconfigure")
"""Communicators that earlier versions had; both summed over gloo."""


def _communicator(name: str, value: Any) -> str:
    """Accept "auto", "nccl" or "gloo"."""
    if value in _GONE:
        raise ConfigError(f'{name} is "{value}", which is gone; use "gloo", which takes the same tensors, or "{AUTO}"')
    text: str = one_of(AUTO, *COMMUNICATORS)(name, value)
    return text


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """Timeouts and thresholds after which a rank, a host or a group counts as failed.

    The end of a process needs none of them: its agent notices at once. What follows each of them: docs/timeouts.md.
    """

    collective_timeout_s: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """Longest time of a collective operation. Between groups a longer one ends its epoch; a group whose ranks wait
    longer in a collective of their engine is out. "auto": 1800 between groups; inside a group ten times the longest
    wait or piece of work so far, at least 60 and at most 1800."""
    report_timeout_s: float = setting(60.0, POSITIVE)
    """A group that has not reported this long after the end of an epoch is left out of the next view. The limit is four
    times the longest microbatch measured, if that is more: a group reports between two microbatches."""

    stopped_timeout_s: float = setting(0.25, POSITIVE)
    """A rank whose process is stopped (SIGSTOP) for longer is out."""
    hang_timeout_s: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """A rank that works on one thing (a microbatch, an update, a call of the dataset) for longer is out. "auto": ten
    times the longest so far, at least 60."""

    storage_timeout_s: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """Limit in place of ``hang_timeout_s`` for a rank inside the dataset or in the kernel (state D) while ranks of
    other groups are there, too: the file system does not answer. "auto": ``collective_timeout_s``, the largest
    value allowed."""
    outside_timeout_s: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """A rank that stays longer in the script's own code between two steps (evaluation, saving) is out. "auto":
    ``collective_timeout_s``, the largest value allowed."""
    stall_notice_s: float = setting(10.0, POSITIVE)
    """When groups have waited this long for another group, the log names that one and its place; again whenever the time has
    doubled, and when the wait ends (docs/timeouts.md)."""

    heartbeat_timeout_s: float = setting(0.8, POSITIVE)
    """A host that is silent for longer counts as cut off; after 3/8 of that if more than half of all hosts say so at once.
    Both limits grow where heartbeats arrive late."""

    straggler_factor: float = setting(
        1.5, Rule("0, or a number > 1", lambda value: is_number(value) and (value == 0 or value > 1), float)
    )
    """A group this many times slower than the median of the other groups, in ``straggler_steps`` consecutive steps,
    gets fewer microbatches until it is as fast as they are. 0: never, as always with other policies than
    "stacked_quota"."""
    straggler_steps: int = setting(3, whole_number(1))
    """Number of consecutive slow steps after which a group counts as slow."""

    state_check_steps: int = setting(64, whole_number(0))
    """In this number of steps, all parameters, buffers and optimizer state of every group are compared once with the
    other groups'. A minority leaves and comes back with the others' state; a tie stops the run. All of it is also
    compared when a group enters or was behind, which such groups do not decide. 0: only then, at checkpoints and
    at the end."""

    @property
    def longest_collective_s(self) -> float:
        """The most seconds that ``collective_timeout_s`` allows a collective; with "auto" half an hour."""
        given = self.collective_timeout_s
        return collective_stalls.CEILING_S if given == AUTO else float(given)


@dataclass(frozen=True, kw_only=True)
class RejoinConfig:
    """Whether lost groups are started again, and how many groups a run may have."""

    enabled: bool = setting(True, TRUE_OR_FALSE)
    """The agents of a lost group's hosts start it again, and it enters the run while the others train."""
    restarts_per_hour: int = setting(6, whole_number(1))
    """Number of starts of one group in any hour, its first start not counted. A group that is lost once more is not
    started again, unless a spare host takes it over."""
    max_groups: int | Auto = setting(AUTO, or_auto(whole_number(1)))
    """Largest number of groups when groups are added, not below the number at the start. "auto": twice the number at
    the start."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """How much of the computation is verified (docs/exactness.md)."""

    microbatches_per_step: int | str = setting(0, _COUNT_OR_SLACK)
    """Number of microbatches of each step that a second group computes, to find silent corruption. It needs
    ``reduction`` "exact". "slack": those that standby groups compute anyway."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Whether, where and how often the run is saved, for failures that the groups do not survive
    (docs/checkpoints.md)."""

    directory: str = setting("", STRING)
    """Directory in which the run is saved, on a file system that all hosts share; a relative path begins where the
    launcher is started. The same command then goes on from the newest checkpoint. "": no checkpoints."""
    period_s: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """Time between two checkpoints. "auto": from the cost of a save and the measured lifetime of the job."""
    keep: int = setting(3, whole_number(1))
    """Number of newest checkpoints to keep."""
    memory_gb: float = setting(0.0, number(0))
    """Memory of each host for copies of the newest checkpoints, its own and those of another host. The next start reads
    from there. Copies outlive the job, but not the host. 0: none."""
    script_directory: str = setting("", STRING)
    """Directory of checkpoints that the script saves and loads by itself. A run that is told to stop then gives the script
    time to save (``session.is_told_to_stop``), and the same command begins again in its run directory. ``launch
    --megatron-lm`` takes it from ``--save`` and ``--load``. "": none."""

    @property
    def resumable(self) -> bool:
        """True if the same command goes on from a checkpoint, the run's or the script's."""
        return bool(self.directory or self.script_directory)


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """The section ``fault_tolerance``. The defaults suit most runs."""

    policy: str = setting(policies.STACKED_QUOTA, one_of(*policies.POLICIES))
    """Which group computes and contributes what, and what follows a loss (docs/policies.md)."""
    standby: str = setting("none", one_of("none", policies.SLACK))
    """Work beside a group's own. "slack": with ``policy`` "stacked_quota", a group that would wait for others computes
    microbatches of another group meanwhile. The other policies have standby work of their own."""
    standby_memory_gb: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """Largest memory of a rank for standby gradients. Each contributor that a group stands by for takes as much as the
    rank's gradients; a run that may need more ends before its first step. "auto": no limit."""
    redundancy: int | Auto = setting(AUTO, or_auto(whole_number(1)))
    """Number of groups that host (prefetch) each shard of the batch, at most the number of groups. "auto": SPARe's
    floor(log2 N + 0.833), or the most that the placement allows; 2 with ``policy`` "replication"."""
    placement: str = setting("golomb", one_of("golomb", "consecutive", "full"))
    """Which groups host which shards. "golomb": any two shards share at most one host. "consecutive": neighbouring
    groups. "full": every group hosts every shard, and prefetches its own."""
    failure_domains: tuple[str, ...] | tuple[int, ...] | Auto = setting(AUTO, _domains_or_auto)
    """Failure domain (rack, switch) of each group; the hosts of a shard are spread over the domains. It needs
    ``placement`` "golomb". "auto": none known."""
    store: str = setting(EMBEDDED, store_setting)
    """Control store, through which groups agree. "embedded": a process of host 0's agent, started again when it dies,
    which another host takes over when host 0 is lost, if all hosts share the run directory (docs/hosts.md). An address:
    an etcd that is there, such as ``etcd://h1:2379,h2:2379,h3:2379``, or ``etcds://...?ca=FILE`` with TLS
    (docs/security.md)."""
    store_patience_s: float = setting(60.0, POSITIVE)
    """A recovery that finds no control store for longer ends the run with exit code 7; the launcher starts it again
    from the newest checkpoint."""
    min_groups: int = setting(1, whole_number(1))
    """The run stops when fewer groups are left. It is at most the number of groups at the start."""
    bucket_mb: float | Auto = setting(AUTO, or_auto(POSITIVE))
    """Largest size of a gradient bucket, counted in fp32. A bucket that was reduced before a failure is not reduced
    again. "auto": an eighth of the gradients, between 1 and 25."""
    reduction: str = setting("fast", one_of("fast", "exact"))
    """How gradients are summed. "fast": in fp32; a failure changes the order of the sum, and so its last bits. "exact":
    without rounding, so that a run with failures ends in the same bits as one without; it takes 16 bytes of memory per
    parameter in place of 8 (docs/exactness.md)."""
    exact_bits: int = setting(grid.MOST_BITS, whole_number(16, grid.MOST_BITS))
    """Bits of a sum with ``reduction`` "exact". With 30 or fewer an element takes 4 bytes on the network, else 8."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """The section ``verify``: microbatches that two groups compute, to find silent corruption (docs/exactness.md)."""
    reduce_dtype: str = setting("fp32", one_of("fp32", "bf16"))
    """Type in which gradients are sent between hosts. "bf16": half the bytes, added in fp32 and rounded at most three
    times, but not with every communicator (docs/gpu.md#which-communicator). Loss and count are exact in both."""
    communicator: str = setting(AUTO, _communicator)
    """Library that sums gradients between groups: "nccl" on their GPUs, "gloo" in the hosts' memory. "auto": "nccl"
    where the model is on GPUs and no two groups share one, else "gloo" (docs/gpu.md)."""
    loss_reduction: str = setting("microbatch", one_of("microbatch", "token"))
    """What the loss of a step is a mean over. "microbatch": the loss function returns the mean loss of a microbatch,
    and all microbatches of a step weigh the same. "token": it returns (sum of the losses, number of tokens), and all
    tokens of a step weigh the same (docs/semantics.md)."""
    inner_shards: int = setting(1, whole_number(1))
    """Number of ranks of a group among which the samples of each microbatch are divided: FSDP's shards, ZeRO-2 and 3,
    Megatron's data-parallel ranks (docs/engines.md)."""
    inner_shards_divide: str = setting("samples", one_of("samples", "sequence", "script"))
    """What of a microbatch the ``inner_shards`` divide. "samples": the first axis of its tensors. "sequence": the
    second axis; each rank has a part of every sequence, and the model's attention exchanges them (Ulysses,
    docs/engines.md)."""
    inner_shards_reduce: str = setting("each", one_of("each", "last"))
    """When FSDP2 sums gradients inside a group. "each": with each microbatch. "last": with the last one that the group
    has at a time; faster, and every rank holds the gradient of the whole model until then (docs/engines.md)."""
    overlap: bool = setting(True, TRUE_OR_FALSE)
    """Buckets are sent during the last backward pass of a step. The results are the same either way."""
    nonfinite: str = setting("skip", one_of("skip", "recompute", "stop"))
    """What follows a gradient that is inf or nan. "skip": the update is left out and the group it came from is named.
    "recompute": that group leaves first and others compute its part again. "stop": the run stops."""
    skip_microbatches: tuple[str, ...] = setting((), _microbatches)
    """Microbatches that are left out of their step, because their samples end every process that computes them: the
    gradient is the mean over the others. A run that stops for such a microbatch names it."""
    seed: int = setting(0, whole_number(0))
    """Seed of everything random that belongs to a microbatch: the order of the samples and dropout.
    ``megatron_ft.init(seed=...)`` overrides it."""
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    """The section ``detector``: timeouts and thresholds."""
    rejoin: RejoinConfig = field(default_factory=RejoinConfig)
    """The section ``rejoin``: restarts of groups."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """The section ``checkpoint``."""
    model: Mapping[str, Any] = field(default_factory=dict, metadata={"rule": _model})
    """The model in the words of Hugging Face's config.json. It is checked against stages and slices before any process
    starts; the script gets it as ``session.config.model``."""

    def check(self) -> None:
        """Raise ``ConfigError`` for a value that its rule refuses, or for values that contradict each other."""
        check(self, "fault_tolerance.")
        detector = self.detector
        for name in ("storage_timeout_s", "outside_timeout_s"):
            value = getattr(detector, name)
            if value != AUTO and value > (longest_s := detector.longest_collective_s):
                given = detector.collective_timeout_s
                known = f'"{AUTO}", at most {longest_s:g}' if given == AUTO else given
                raise ConfigError(
                    f"fault_tolerance.detector.{name} is {value} and detector.collective_timeout_s is "
                    f"{known}; the other groups wait for a rank no longer than "
                    f"collective_timeout_s: raise that, too, or lower {name}"
                )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run: the section and the batch, resolved for a number of groups.

    A run has as many shards as groups at its start. A run that goes on from a checkpoint keeps the number of shards it began
    with, because the result must not depend on the number of groups.
    """

    groups: int
    """Number of groups at the start, >= 1."""
    ranks_per_group: int = 1
    """Number of ranks in each group, >= 1."""
    samples_per_microbatch: int = 1
    """``train_micro_batch_size_per_gpu``."""
    microbatches_per_group: int = 1
    """G, the number of microbatches of a shard in each step."""
    gradient_clipping: float = 0.0
    """Largest norm of a step's gradient, >= 0. 0: gradients are not clipped."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The other settings of the file, which are DeepSpeed's, unchanged."""
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    """The section ``fault_tolerance``."""
    shards: int = 0
    """N, the number of shards. 0: equal to ``groups``."""

    def __post_init__(self) -> None:
        if not self.shards:
            object.__setattr__(self, "shards", self.groups)

    @property
    def microbatches(self) -> int:
        """N*G, the number of microbatches in every step."""
        return self.shards * self.microbatches_per_group

    @property
    def samples_per_step(self) -> int:
        """The global batch: the number of samples in every step."""
        return self.microbatches * self.samples_per_microbatch

    @property
    def max_groups(self) -> int:
        """The largest number of groups at the same time. Group numbers are below it."""
        asked = self.fault_tolerance.rejoin.max_groups
        return 2 * self.groups if asked == AUTO else asked

    @property
    def exact_bits(self) -> int:
        """Bits of a sum (``core.exactness.grid``); 0: sums are rounded."""
        settings = self.fault_tolerance
        return settings.exact_bits if settings.reduction == "exact" else 0

    @property
    def digests(self) -> int:
        """The number of digests that each group can send in a step."""
        return verification.slots(self.fault_tolerance.verify.microbatches_per_step, self.groups)

    @property
    def stages(self) -> int:
        """Number of pipeline stages of a group, ``pipeline.stages`` of the config."""
        return parallelism.stages(self.engine)

    @property
    def slices(self) -> int:
        """Number of tensor-parallel ranks of a stage, ``tensor_parallel.autotp_size`` of the config."""
        return parallelism.slices(self.engine)

    @property
    def inner_shards(self) -> int:
        """Number of ranks of a group among which the samples of a microbatch are divided."""
        return self.fault_tolerance.inner_shards

    @property
    def model(self) -> Mapping[str, Any]:
        """Description of the model, ``fault_tolerance.model``."""
        return self.fault_tolerance.model

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON objects. The launcher hands it to its ranks and writes it to the run directory."""
        return codec.encode_fields(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RunConfig:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what is no config."""
        section = dict(raw["fault_tolerance"])
        section |= {name: section[name] for name in ("detector", "failure_domains")}  # KeyError: only others may lack
        if section.get("communicator") in _GONE:  # of older records
            section["communicator"] = "gloo"
        if section.get("store") in STORE_WORDS:  # older records have "auto", and "etcd", which no run starts any more
            section["store"] = EMBEDDED
        return codec.decode_fields(cls, {**raw, "fault_tolerance": section})


def load(path: str | Path, *, groups: int, ranks_per_group: int | None = None, shards: int | None = None) -> RunConfig:
    """Read a config file and resolve it; arguments as for :func:`resolve`. Raises ``ConfigError``."""
    return resolve(read(path), groups=groups, ranks_per_group=ranks_per_group, shards=shards)


def read(path: str | Path | None) -> dict[str, Any]:
    """Return the settings of a config file, with the content of the file that ``fault_tolerance.model`` names. None: all
    settings have their defaults.

    Raises ``ConfigError`` for a file that does not exist, cannot be read, or is no JSON object.
    """
    if path is None:
        return {}
    path = Path(path)
    raw = settings_file.read(path, "config")
    section = raw.get("fault_tolerance")
    if isinstance(section, dict) and isinstance(section.get("model"), str):
        model = settings_file.read(path.parent / section["model"], "fault_tolerance.model")
        raw["fault_tolerance"] = {**section, "model": model}
    return raw


def _refuse_quoted(value: Any, name: str = "") -> None:
    """Raise ``ConfigError`` for "true" and "false" in quotes: a string that is not empty counts as true. The description
    of the user's model is not this package's."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            where = f"{name}.{key}" if name else str(key)
            if where != "fault_tolerance.model":
                _refuse_quoted(inner, where)
    elif isinstance(value, list | tuple):
        for number_, inner in enumerate(value):
            _refuse_quoted(inner, f"{name}[{number_}]")
    elif isinstance(value, str) and value.lower() in ("true", "false"):
        raise ConfigError(
            f'{name} is the string "{value}", which would count as true; write {value.lower()} without quotes'
        )


def resolve(
    raw: Mapping[str, Any], *, groups: int, ranks_per_group: int | None = None, shards: int | None = None
) -> RunConfig:
    """Validate the settings ``raw`` for a run, and fill in what they leave open.

    Args:
        raw: The content of a config file.
        groups: Number of groups, >= 1.
        ranks_per_group: Number of ranks in each group, >= 1. None: the number that the pipeline, tensor parallelism and
            inner shards of ``raw`` need.
        shards: Number of shards. None: one for each group. A run that goes on from a checkpoint gives the number it
        began with.

    Raises:
        ConfigError: with the value, the rule and the remedy.
    """
    whole_number(1)("--groups", groups)
    if ranks_per_group is not None:
        whole_number(1)("--ranks-per-group", ranks_per_group)
    known = USED_ENGINE_KEYS | ENGINE_KEYS
    for key in raw:
        if key not in known | parallelism.REFUSED_KEYS:
            raise ConfigError(f"setting {key!r} is not known{nearest(key, known)}")
    _refuse_quoted(raw)
    clipping = number(0)("gradient_clipping", raw.get("gradient_clipping", 0.0))  # 0 turns clipping off
    section = _section(FaultToleranceConfig, raw.get("fault_tolerance", {}), "fault_tolerance")
    section.check()
    if section.min_groups > groups:
        raise ConfigError(
            f"fault_tolerance.min_groups is {section.min_groups} but the run starts with {groups} groups; "
            f"lower it or start with more --groups"
        )
    if section.rejoin.max_groups != AUTO and section.rejoin.max_groups < groups:
        raise ConfigError(
            f"fault_tolerance.rejoin.max_groups is {section.rejoin.max_groups} but the run starts with {groups} groups; "
            f"raise it or leave it out"
        )
    if section.policy == policies.RESTART:
        if not section.checkpoint.directory:
            raise ConfigError(
                'fault_tolerance.policy is "restart" but fault_tolerance.checkpoint.directory is empty: every loss would '
                "throw away the whole run; name a directory"
            )
        section = replace(section, rejoin=replace(section.rejoin, enabled=False))  # a run with a lost group ends
    if section.standby != "none" and section.policy != policies.STACKED_QUOTA:
        raise ConfigError(
            f'fault_tolerance.standby is "{section.standby}" but policy is "{section.policy}", which has standby work of '
            f'its own or none; leave standby out, or use policy "{policies.STACKED_QUOTA}"'
        )
    _check_exact(section, groups)
    if not policies.policy(section.policy).balances:  # a slow group keeps its load
        section = replace(section, detector=replace(section.detector, straggler_factor=0.0))
    parallelism.check(raw, section.model)
    if parallelism.on(raw, "fp16") and section.nonfinite != "skip":
        raise ConfigError(
            f'fp16 is enabled and fault_tolerance.nonfinite is "{section.nonfinite}"; a loss scale is found by skipping '
            f'steps that overflow: use "skip", or bf16'
        )
    if section.checkpoint.directory:  # a rank may be started elsewhere, and a script may go elsewhere
        where = replace(section.checkpoint, directory=os.path.abspath(section.checkpoint.directory))
        section = replace(section, checkpoint=where)
    shards = shards or groups
    samples, per_group = _batch(raw, shards)
    if section.inner_shards_divide == "samples" and samples % section.inner_shards:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {samples} and {parallelism.SHARDS} is {section.inner_shards}, among which "
            f"the samples of a microbatch are divided evenly; use a multiple of {section.inner_shards}"
        )
    run = RunConfig(
        groups=groups,
        shards=shards,
        ranks_per_group=parallelism.ranks_per_group(raw, ranks_per_group),
        samples_per_microbatch=samples,
        microbatches_per_group=per_group,
        gradient_clipping=clipping,
        engine={key: value for key, value in raw.items() if key in ENGINE_KEYS},
        fault_tolerance=section,
    )
    _check_skipped(run)
    placement = placement_of(run)
    for warning in placement.warnings:
        warnings.warn(f"fault_tolerance.failure_domains: {warning}", stacklevel=2)
    return replace(run, fault_tolerance=replace(section, redundancy=placement.redundancy))


def _check_skipped(run: RunConfig) -> None:
    """Raise ``ConfigError`` for a microbatch that the run does not have, or a step of which nothing is left."""
    name, skipped = "fault_tolerance.skip_microbatches", set(run.fault_tolerance.skip_microbatches)
    microbatches = [Microbatch.parse(text) for text in skipped]
    for microbatch in microbatches:
        if microbatch.step < 0 or not 0 <= microbatch.shard < run.shards or microbatch.index < 0:
            raise ConfigError(
                f"{name} has {str(microbatch)!r}; the run has the shards 0 to {run.shards - 1}: correct it"
            )
    for step, count in Counter(microbatch.step for microbatch in microbatches).items():
        if count >= run.microbatches:
            raise ConfigError(f"{name} leaves out all {count} microbatches of step {step}; at least one must be left")


def _check_exact(section: FaultToleranceConfig, groups: int) -> None:
    """Raise ``ConfigError`` for settings that exact reduction or verification cannot have."""
    count = section.verify.microbatches_per_step
    if section.reduction != "exact":
        if count:
            raise ConfigError(
                f"fault_tolerance.verify.microbatches_per_step is {count!r} but reduction is "
                f'"{section.reduction}", whose gradients have no digest to compare: set reduction to "exact"'
            )
        return
    if section.reduce_dtype != "fp32":
        raise ConfigError(
            f'fault_tolerance.reduce_dtype is "{section.reduce_dtype}" but reduction is "exact", which must not round what '
            f"it sends: leave reduce_dtype out, and choose exact_bits instead"
        )
    if section.policy == policies.DROP:
        raise ConfigError(
            'fault_tolerance.policy is "drop" but reduction is "exact": a batch that shrinks with each loss is another '
            "result; use another policy"
        )
    standby = section.standby != "none" or section.policy in (policies.SPARE, policies.RECOVER, policies.REPLICATION)
    if count == verification.SLACK and not standby:
        raise ConfigError(
            f'fault_tolerance.verify.microbatches_per_step is "slack" but no group has standby work: set standby to '
            f'"{policies.SLACK}", use a policy that has some, or give a number'
        )
    if count != verification.SLACK and int(count) > groups * _MOST_VERIFIED:
        raise ConfigError(
            f"fault_tolerance.verify.microbatches_per_step is {count} with {groups} groups; at most {_MOST_VERIFIED} for "
            f"each group make sense: lower it"
        )
    if count and groups < 2:
        raise ConfigError(
            f"fault_tolerance.verify.microbatches_per_step is {count!r} with one group, which no other can verify; start "
            f"with more --groups"
        )


def policy_of(run: RunConfig) -> policies.Policy:
    """Return the policy of a resolved run."""
    settings = run.fault_tolerance
    copies = settings.redundancy if isinstance(settings.redundancy, int) else 2
    return policies.policy(settings.policy, copies=copies, slack=settings.standby == policies.SLACK)


def check_standby_memory(run: RunConfig, gradient_bytes: int) -> None:
    """Raise ``ConfigError`` if a rank may need more memory for standby gradients than ``standby_memory_gb`` allows.

    ``gradient_bytes``: the memory of the rank's own gradients."""
    limit = run.fault_tolerance.standby_memory_gb
    if limit == AUTO:
        return
    batch = policies.Batch(run.shards, run.microbatches_per_group, placement_of(run))
    parts, policy = policy_of(run).most_parts(batch), run.fault_tolerance.policy
    if (needed_gb := parts * gradient_bytes / 1e9) > limit:
        each = f"with {gradient_bytes / 1e9:.3g} GB of gradients for each"
        raise ConfigError(
            f'fault_tolerance.standby_memory_gb is {limit:g} but with policy "{policy}" a group may stand by for {parts} '
            f"others, {each}; allow {needed_gb:.3g}, or lower redundancy"
        )


def placement_of(run: RunConfig) -> replication.Placement:
    """Return which groups host which shards. All processes of a run call this function, so they have the same
    placement.

    Raises ``ConfigError`` for a redundancy or failure domains that the placement cannot have.
    """
    settings, groups, name = run.fault_tolerance, run.shards, "fault_tolerance.redundancy"
    if settings.policy == policies.REPLICATION:
        return replication.sets(groups, _copies(settings, groups))
    if settings.policy == policies.RECOVER:  # any group computes any microbatch
        if settings.redundancy not in (AUTO, groups):
            raise ConfigError(
                f'{name} is {settings.redundancy}; with policy "recover" any group computes any microbatch: leave it out'
            )
        return replication.full(groups)
    hosts = _hosts(settings, groups)
    if settings.policy == policies.SPARE and hosts < 2:
        raise ConfigError(
            f'{name} is {hosts} with {groups} groups and placement "{settings.placement}"; with policy "spare" a shard '
            "without a second host ends the attempt at the first loss: use at least 2, with placement "
            '"full" or more --groups'
        )
    if settings.failure_domains != AUTO:
        return replication.domain_aware(_domains(run), hosts)
    if settings.placement == "golomb":
        return replication.golomb(groups, hosts)
    if settings.placement == "consecutive":
        return replication.consecutive(groups, hosts)
    return replication.full(groups)


def job_of(run: RunConfig, placement: replication.Placement, *, buckets: int, steps: int, first: int = -1) -> Job:
    """Return the settings of the step protocol for a run; its groups and the replay of its record use this function.
    ``first``: see ``Job``."""
    settings = run.fault_tolerance
    return Job(
        shards=run.shards,
        per_shard=run.microbatches_per_group,
        buckets=buckets,
        steps=steps,
        min_groups=settings.min_groups,
        report_timeout_s=settings.detector.report_timeout_s,
        straggler_factor=settings.detector.straggler_factor,
        straggler_steps=settings.detector.straggler_steps,
        placement=placement,
        policy=policy_of(run),
        skip=frozenset(map(Microbatch.parse, settings.skip_microbatches)),
        verify=settings.verify.microbatches_per_step,
        digests=run.digests,
        first=first,
    )


def _copies(settings: FaultToleranceConfig, groups: int) -> int:
    """Return the number of copies of the policy "replication"."""
    copies = 2 if settings.redundancy == AUTO else settings.redundancy
    if settings.failure_domains != AUTO:
        raise ConfigError(
            'fault_tolerance.failure_domains is given but policy is "replication", whose copies are neighbouring groups; '
            "leave it out, or number the groups so that neighbours are in different domains"
        )
    if copies < 2 or groups % copies:
        able = listed((n for n in range(2, groups + 1) if not groups % n), most=8) or "none, start with more groups"
        raise ConfigError(
            f'fault_tolerance.redundancy is {copies} with policy "replication" and {groups} groups; it must be at least 2 '
            f"and divide the number of groups: {able}"
        )
    return copies


def _hosts(settings: FaultToleranceConfig, groups: int) -> int:
    """Return the number of hosts of each shard with a placement. A number that the run cannot have is refused, not
    changed."""
    name, asked, placement = "fault_tolerance.redundancy", settings.redundancy, settings.placement
    if asked == AUTO:
        largest = replication.largest_redundancy(groups) if placement == "golomb" else groups
        return groups if placement == "full" else min(replication.optimal_redundancy(groups), largest)
    if asked > groups:
        raise ConfigError(
            f"{name} is {asked} but the run starts with {groups} groups, and a group hosts a shard once; lower it to at "
            f"most {groups} or start with more --groups"
        )
    if placement == "full" and asked != groups:
        raise ConfigError(
            f'{name} is {asked} but with placement "full" each of the {groups} groups hosts every shard; leave it out, or '
            f'use placement "golomb"'
        )
    if placement == "golomb" and settings.failure_domains == AUTO and asked > replication.largest_redundancy(groups):
        raise ConfigError(
            f'{name} is {asked}; with placement "golomb" any two shards share at most one host, which {groups} groups '
            f"allow up to redundancy {replication.largest_redundancy(groups)}: lower it, start with more --groups, or use "
            f'placement "consecutive" or "full"'
        )
    return asked


def _domains(run: RunConfig) -> tuple[str | int, ...]:
    settings, name = run.fault_tolerance, "fault_tolerance.failure_domains"
    if settings.placement != "golomb":
        raise ConfigError(
            f'{name} is given but placement is "{settings.placement}", which does not look at domains; use placement '
            f'"golomb", or leave {name} out'
        )
    if len(settings.failure_domains) != run.groups:
        raise ConfigError(
            f"{name} names {len(settings.failure_domains)} domains but the run starts with {run.groups} groups; name one "
            f"for each group, in order"
        )
    # Shard i belongs to group i; a shard beyond the last group has no group, and gets a domain of its own.
    beyond = range(run.groups, run.shards)
    missing = (-1 - shard if isinstance(settings.failure_domains[0], int) else f"no group {shard}" for shard in beyond)
    return (*settings.failure_domains, *missing)[: run.shards]


def _batch(raw: Mapping[str, Any], groups: int) -> tuple[int, int]:
    """Return samples per microbatch and microbatches per group.

    DeepSpeed's rule: train_batch_size = micro batch x accumulation steps x groups. Any two of them give the third.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if name in raw:
            whole_number(1)(name, raw[name])
    total, samples, per_group = (raw.get(name) for name in names)
    if total is None:
        return samples or 1, per_group or 1
    if samples is not None and per_group is not None:
        if total != samples * per_group * groups:
            raise ConfigError(
                f"train_batch_size is {total} but {samples} samples x {per_group} microbatches x {groups} groups are "
                f"{samples * per_group * groups}; drop one of the three settings or correct it"
            )
        return samples, per_group
    known = samples or per_group or 1
    if total % (known * groups):
        raise ConfigError(
            f"train_batch_size {total} cannot be divided over {groups} groups"
            + (f" x {known} {'samples per microbatch' if samples else 'microbatches per group'}" if known > 1 else "")
            + f"; use a multiple of {known * groups} or another number of --groups"
        )
    rest = total // (known * groups)
    return (samples, rest) if samples is not None else (rest, per_group or 1)


def _section(cls: type, raw: Any, where: str) -> Any:
    """Build a section from JSON. Raises ``ConfigError`` for unknown keys and for values that their rules refuse."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is {raw!r}; it must be a JSON object {{...}}")
    defaults, values = cls(), {}
    known = {f.name: f for f in fields(cls)}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(f"setting {where}.{key} is not known{nearest(key, known)}")
        default, name = getattr(defaults, key), f"{where}.{key}"
        nested = is_dataclass(default)
        values[key] = _section(type(default), value, name) if nested else known[key].metadata["rule"](name, value)
    return cls(**values)
