"""The ``"fault_tolerance"`` section of a DeepSpeed-style JSON config: typed, frozen, validated once, before any process.

An explicit value beats the environment, always. Keys outside the section belong to the engine: DeepSpeed gets them, and
the plain engine names them in a warning instead of ignoring them in silence.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_ft import split
from megatron_ft.checks import (
    AUTO,
    at_least,
    auto_or_count,
    auto_or_positive,
    is_number,
    nearest,
    no_duplicates,
    one_of,
    positive,
)
from megatron_ft.core import replication
from megatron_ft.errors import ConfigError

EMBEDDED, OWN_ETCD, ETCD = "embedded", "etcd", "etcd://"
"""What ``store`` may be, the last with addresses."""
STACKED_QUOTA, DROP, RESTART = "stacked_quota", "drop", "restart"
"""What ``policy`` may be."""

USED_ENGINE_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fault_tolerance",
    }
)
ENGINE_KEYS = frozenset(
    """optimizer scheduler fp16 bf16 amp zero_optimization zero_allow_untested_optimizer steps_per_print
    wall_clock_breakdown dump_state prescale_gradients gradient_predivide_factor sparse_gradients communication_data_type
    activation_checkpointing flops_profiler comms_logger tensorboard wandb csv_monitor monitor_config aio autotuning
    data_types data_efficiency curriculum_learning elasticity pipeline compression_training checkpoint
    tensor_parallel memory_breakdown seed disable_allgather sparse_attention""".split()
)
"""Those of DeepSpeed that only its engine acts on."""


def _model(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {value!r}; it must be a JSON object like Hugging Face's config.json, or the path of such a file"
        )
    return dict(value)


def _auto_or_domains(name: str, value: Any) -> tuple[str, ...] | tuple[int, ...] | str:
    if value == AUTO:
        return value
    rule = f'it must be "{AUTO}" or a list with the failure domain (e.g. rack) of each group'
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is {value!r}; {rule}")
    kinds = {type(domain) for domain in value}
    if not (kinds <= {str} or kinds <= {int}):  # 1 and "1" would be two racks, and nobody would notice
        raise ConfigError(f"{name} is {value!r}; {rule}, all of them strings or all of them whole numbers")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """When somebody is given up. Deaths that an agent sees need none of these: they are known at once."""

    collective_timeout_s: float = 1800.0
    """A collective of the outer communicator that takes longer ends its epoch."""
    report_timeout_s: float = 60.0
    """A live group whose report does not come in time at the end of an epoch is left out of the next view. Must be longer
    than its longest microbatch: a group reports between two microbatches."""

    stopped_timeout_s: float = 0.5
    """A rank whose process is stopped (SIGSTOP) for longer is out."""
    hang_timeout_s: float | str = field(default=AUTO, metadata={"read": auto_or_positive})
    """A rank that works on one thing for longer is out. Auto: ten times the longest so far, at least a minute."""

    heartbeat_timeout_s: float = 0.8
    """A host of which nothing is heard for longer is taken for cut off; more where beats have been seen to come late."""

    straggler_factor: float = 1.5
    """A group that takes so many times the others' median for a microbatch, in ``straggler_steps`` steps in a row, gets
    fewer of them until it is as fast again. 0: never."""
    straggler_steps: int = 3

    def check(self) -> None:
        at_least("fault_tolerance.detector.straggler_steps", self.straggler_steps, 1)
        if self.straggler_factor and not self.straggler_factor > 1:
            raise ConfigError(
                f"fault_tolerance.detector.straggler_factor is {self.straggler_factor}; it must be greater than 1, or 0 to "
                f"treat all groups alike"
            )
        positive("fault_tolerance.detector.heartbeat_timeout_s", self.heartbeat_timeout_s)
        positive("fault_tolerance.detector.stopped_timeout_s", self.stopped_timeout_s)
        positive("fault_tolerance.detector.collective_timeout_s", self.collective_timeout_s)
        positive("fault_tolerance.detector.report_timeout_s", self.report_timeout_s)


@dataclass(frozen=True, kw_only=True)
class RejoinConfig:
    """Whether lost groups come back."""

    enabled: bool = True
    """A lost group is started again by the agents of its hosts, and enters at the beginning of a step."""
    restarts_per_hour: int = 6
    """So often in any hour; a group that is lost once more is not started again, unless a spare host takes it over."""
    max_groups: int | str = field(default=AUTO, metadata={"read": auto_or_count})
    """So many there may be at once when hosts are added (``megatron-ft join``). Auto: twice as many as at the start."""

    def check(self) -> None:
        at_least("fault_tolerance.rejoin.restarts_per_hour", self.restarts_per_hour, 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Whether, where and how often the run is saved, for what groups cannot survive together (docs/checkpoints.md)."""

    directory: str = ""
    """On a file system that all hosts share; seen from where the launcher is started. Empty: nothing is saved."""
    period_s: float | str = field(default=AUTO, metadata={"read": auto_or_positive})
    """Seconds between two checkpoints. Auto: from what a save costs and how long the job has been seen to live."""
    keep: int = 3
    """So many of the newest stay."""
    memory_gb: float = 0.0
    """So many 10^9 bytes of each host's memory may hold files of the newest ones, too, its own and another host's: a start
    then reads from there. They outlive the job, not the host. 0: none."""

    def check(self) -> None:
        at_least("fault_tolerance.checkpoint.keep", self.keep, 1)
        if not 0 <= self.memory_gb < float("inf"):
            raise ConfigError(f"fault_tolerance.checkpoint.memory_gb is {self.memory_gb}; it must be a number, 0 or more")


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """What a user can set. Defaults are meant to be left alone.

    A setting whose type its default does not tell says in ``metadata["read"]`` how it is read.
    """

    policy: str = STACKED_QUOTA
    """What becomes of a lost group's microbatches: the others compute them. For comparison: ``drop``, they are left out of
    the batch; ``restart``, any loss ends the run, and it is started again from the last checkpoint."""
    redundancy: int | str = field(default=AUTO, metadata={"read": auto_or_count})
    """How many groups host each shard; after :func:`resolve` a number, the one in force."""
    placement: str = "golomb"
    """Which groups host which shards. Groups prefetch what they host; ``full``: everything, and prefetch their own."""
    failure_domains: tuple[str, ...] | tuple[int, ...] | str = field(default=AUTO, metadata={"read": _auto_or_domains})
    """The rack, switch, ... of each group: the hosts of a shard are spread over them. Auto: none known."""
    store: str = EMBEDDED
    """Where groups agree: ``embedded``, in a process of the run on host 0; ``etcd``, in one that the run starts on its first
    three hosts, any of which may be lost; ``etcd://host:port,host:port,host:port``, in one that is there already."""
    min_groups: int = 1
    bucket_mb: float | str = field(default=AUTO, metadata={"read": auto_or_positive})
    """Largest size of a gradient bucket, in MiB of fp32; a bucket finished before a failure is not reduced again. Auto: an
    eighth of the gradients, between 1 and 25."""
    reduce_dtype: str = "fp32"
    """In which type gradients are sent between groups: fp32, or bf16, which rounds them. Loss and count are exact always."""
    overlap: bool = True
    """Whether a bucket is sent during the backward pass of a step's last microbatch. The numbers are the same either way."""
    nonfinite: str = "skip"
    """A step whose gradient is inf or nan: ``skip`` its update, ``recompute`` what it came from elsewhere first, or ``stop``
    the run."""
    seed: int = 0
    """Seed of everything random that belongs to a microbatch: which samples, which dropout masks."""
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    rejoin: RejoinConfig = field(default_factory=RejoinConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    model: Mapping[str, Any] = field(default_factory=dict, metadata={"read": _model})
    """What the model looks like, in the words of Hugging Face's config.json, or the path of one beside the config: checked
    against the ranks of a group before anything starts; the script gets it as ``session.config.model``."""

    def check(self) -> None:
        one_of("fault_tolerance.policy", self.policy, (STACKED_QUOTA, DROP, RESTART))
        one_of("fault_tolerance.placement", self.placement, ("golomb", "consecutive", "full"))
        _embedded_or_etcd("fault_tolerance.store", self.store)
        one_of("fault_tolerance.nonfinite", self.nonfinite, ("skip", "recompute", "stop"))
        at_least("fault_tolerance.min_groups", self.min_groups, 1)
        one_of("fault_tolerance.reduce_dtype", self.reduce_dtype, ("fp32", "bf16"))
        at_least("fault_tolerance.seed", self.seed, 0)
        self.detector.check()
        self.rejoin.check()
        self.checkpoint.check()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run: the section above plus the batch, resolved for a number of groups.

    The global batch is ``shards * microbatches_per_group * samples_per_microbatch`` samples, in every step. There are as
    many shards as groups, but in a run that goes on from a checkpoint as many as there were when it began: what is learned
    must not depend on how many groups are there today.
    """

    groups: int
    ranks_per_group: int = 1
    samples_per_microbatch: int = 1
    microbatches_per_group: int = 1
    gradient_clipping: float = 0.0
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The other settings of the file, as they are there: those of DeepSpeed."""
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    shards: int = 0
    """N; left out, ``groups``."""

    def __post_init__(self) -> None:
        if not self.shards:
            object.__setattr__(self, "shards", self.groups)

    @property
    def microbatches(self) -> int:
        """N*G, the number of microbatches in every step."""
        return self.shards * self.microbatches_per_group

    @property
    def room(self) -> int:
        """How many groups there may be: their numbers are below that."""
        asked = self.fault_tolerance.rejoin.max_groups
        return 2 * self.groups if asked == AUTO else asked

    @property
    def stages(self) -> int:
        """Of a group's pipeline, ``pipeline.stages`` of the config."""
        return split.stages(self.engine)

    @property
    def slices(self) -> int:
        """Of each stage (tensor parallelism), ``tensor_parallel.autotp_size`` of the config."""
        return split.slices(self.engine)

    @property
    def model(self) -> Mapping[str, Any]:
        """What the model looks like, as ``fault_tolerance.model`` says."""
        return self.fault_tolerance.model

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RunConfig:
        """Inverse of :meth:`to_json` (what the launcher hands to its ranks)."""
        section = dict(raw["fault_tolerance"])
        section["detector"] = DetectorConfig(**section["detector"])
        section["rejoin"] = RejoinConfig(**section.get("rejoin", {}))  # older records have none
        section["checkpoint"] = CheckpointConfig(**section.get("checkpoint", {}))
        section["failure_domains"] = _auto_or_domains("fault_tolerance.failure_domains", section["failure_domains"])
        return cls(**{**raw, "fault_tolerance": FaultToleranceConfig(**section)})


def load(
    path: str | Path, *, groups: int, ranks_per_group: int | None = None, shards: int | None = None
) -> RunConfig:
    """Read and resolve a config file. Raises ``ConfigError`` naming value, rule and remedy."""
    return resolve(read(path), groups=groups, ranks_per_group=ranks_per_group, shards=shards)


def read(path: str | Path) -> dict[str, Any]:
    """The settings of a config file as they are there, with the file that describes the model read, too."""
    path = Path(path)
    raw = _json(path, "config")
    section = raw.get("fault_tolerance")
    if isinstance(section, dict) and isinstance(section.get("model"), str):
        raw["fault_tolerance"] = {**section, "model": _json(path.parent / section["model"], "fault_tolerance.model")}
    return raw


def _json(path: Path, what: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        kind = "DeepSpeed-style JSON file" if what == "config" else "JSON file, seen from the config"
        raise ConfigError(f"{what} {path} does not exist; give the path of a {kind}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from None
    try:
        raw = json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} {path} is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{what} {path} holds a {type(raw).__name__}; it must be a JSON object {{...}}")
    return raw


def resolve(
    raw: Mapping[str, Any], *, groups: int, ranks_per_group: int | None = None, shards: int | None = None
) -> RunConfig:
    """Validate a config that is already a mapping, for a run of ``groups`` groups.

    Args:
        ranks_per_group: by default what the settings of pipeline and tensor parallelism need.
        shards: of a run that goes on, as many as it began with; else one for each group.
    """
    at_least("--groups", groups, 1)
    if ranks_per_group is not None:
        at_least("--ranks-per-group", ranks_per_group, 1)
    known = USED_ENGINE_KEYS | ENGINE_KEYS
    for key in raw:
        if key not in known | split.REFUSED_KEYS:
            raise ConfigError(f"setting {key!r} is not known{nearest(key, known)}")
    clipping = raw.get("gradient_clipping", 0.0)
    if not is_number(clipping) or clipping < 0:
        raise ConfigError(f"gradient_clipping is {clipping!r}; it must be a number >= 0 (0 turns clipping off)")
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
    if section.policy == RESTART:
        section = _restart(section, groups)
    split.check(raw, section.model)
    if section.checkpoint.directory:  # a rank may be started elsewhere, and a script may go elsewhere
        where = replace(section.checkpoint, directory=os.path.abspath(section.checkpoint.directory))
        section = replace(section, checkpoint=where)
    shards = shards or groups
    samples, per_group = _batch(raw, shards)
    run = RunConfig(
        groups=groups,
        shards=shards,
        ranks_per_group=split.ranks_per_group(raw, ranks_per_group),
        samples_per_microbatch=samples,
        microbatches_per_group=per_group,
        gradient_clipping=float(clipping),
        engine={key: value for key, value in raw.items() if key in ENGINE_KEYS},
        fault_tolerance=section,
    )
    placement = placement_of(run)
    for warning in placement.warnings:
        warnings.warn(f"fault_tolerance.failure_domains: {warning}", stacklevel=2)
    return replace(run, fault_tolerance=replace(section, redundancy=placement.redundancy))


def _restart(section: FaultToleranceConfig, groups: int) -> FaultToleranceConfig:
    """With fewer groups than all there is no run."""
    if not section.checkpoint.directory:
        raise ConfigError(
            'fault_tolerance.policy is "restart" but fault_tolerance.checkpoint.directory is empty: every loss would throw '
            "away the whole run; name a directory"
        )
    return replace(section, min_groups=groups, rejoin=replace(section.rejoin, enabled=False))


def placement_of(run: RunConfig) -> replication.Placement:
    """Who hosts which shards in this run. Everybody who needs the placement makes it here, so all have the same.

    Raises ``ConfigError`` for a redundancy or failure domains that the placement cannot have.
    """
    settings, redundancy = run.fault_tolerance, _redundancy(run)
    if settings.failure_domains != AUTO:
        return replication.domain_aware(_domains(run), redundancy)
    if settings.placement == "golomb":
        return replication.golomb(run.shards, redundancy)
    if settings.placement == "consecutive":
        return replication.consecutive(run.shards, redundancy)
    return replication.full(run.shards)


def _redundancy(run: RunConfig) -> int:
    """The number in force. A redundancy that is asked for is refused rather than changed."""
    settings, groups, name = run.fault_tolerance, run.shards, "fault_tolerance.redundancy"
    asked, placement = settings.redundancy, settings.placement
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


def _domains(run: RunConfig) -> tuple[str, ...] | tuple[int, ...]:
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
    # A shard's number is its group's, where there is one; shards beyond the last group are nobody's own.
    beyond = range(run.groups, run.shards)
    missing = tuple(-1 - shard if isinstance(settings.failure_domains[0], int) else f"no group {shard}" for shard in beyond)
    return (settings.failure_domains + missing)[: run.shards]


def _batch(raw: Mapping[str, Any], groups: int) -> tuple[int, int]:
    """DeepSpeed's rule: train_batch_size = micro batch x accumulation steps x groups; any two give the third."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if name in raw:
            at_least(name, raw[name], 1)
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
    """Build a config dataclass from JSON, refusing unknown keys and wrong types."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is {raw!r}; it must be a JSON object {{...}}")
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(f"setting {where}.{key} is not known{nearest(key, known)}")
        default = getattr(cls(), key)
        if read := known[key].metadata.get("read"):
            values[key] = read(f"{where}.{key}", value)
        elif hasattr(default, "__dataclass_fields__"):
            values[key] = _section(type(default), value, f"{where}.{key}")
        else:
            values[key] = _typed(f"{where}.{key}", value, default)
    return cls(**values)


def _typed(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, float):
        if not is_number(value):
            raise ConfigError(f"{name} is {value!r}; it must be a number")
        return float(value)
    if isinstance(default, bool) or not isinstance(default, int):
        if not isinstance(value, type(default)):
            raise ConfigError(f"{name} is {value!r}; it must be a {type(default).__name__}")
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    return value


def _embedded_or_etcd(name: str, value: str) -> None:
    if value in (EMBEDDED, OWN_ETCD):
        return
    rule = f'it must be "{EMBEDDED}", "{OWN_ETCD}" or "{ETCD}HOST:PORT,HOST:PORT,HOST:PORT" with all nodes of an etcd'
    endpoints = value.removeprefix(ETCD).split(",")
    if not value.startswith(ETCD):
        raise ConfigError(f"{name} is {value!r}; {rule}")
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or set(host) & set("/ @?") or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"{name} is {value!r}, of which {endpoint!r} is no HOST:PORT; {rule}")
    if len(set(endpoints)) < len(endpoints):
        raise ConfigError(f"{name} is {value!r}, which names a node twice; {rule}")
