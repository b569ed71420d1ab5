"""The replication manager: which groups host (prefetch) which shards (SPARe, arXiv 2603.00357, section 4).

Shard j of N is hosted by r groups; a group's r shards are its *stack*, its own shard first. SPARe's Theorem 4.1 needs
that *any two shards share at most one host*. Intuition: the groups that die with one shard's hosts then weaken every
other shard by one host at most, so no small set of failures takes a shard out, and the load of the dead spreads over
many survivors. Stacks made by cyclic rotation (group i hosts i + o mod N for r offsets o) have it exactly when all
differences of the offsets are distinct mod N: a *cyclic Golomb ruler*, or Sidon set. The paper's text takes consecutive
offsets, which do not have it; both are here.

Failures assumed: whole groups, singly, and whole failure domains (rack, switch), against which ``domain_aware`` spreads
the hosts of a shard. A shard without a live host is a wipe-out to SPARe; to quotas it is a slower read of the dataset.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from megatron_ft.core import spreading
from megatron_ft.errors import ConfigError
from megatron_ft.types import GroupId
