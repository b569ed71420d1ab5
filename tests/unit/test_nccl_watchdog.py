"""NCCL's watchdog, against a fake that behaves like NCCL's backend: its environment, its failures, and the end of its
communicators."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from megatron_ft.errors import ConfigError
from megatron_ft.run.collectives.nccl_watchdog import abort_all, environment, failure, reporting

PATIENCE_S = 60
"""The time until a test gives up on an event that is due at once."""
ErrorType = torch._C._distributed_c10d.ErrorType


class Nccl:
    """The part of ``ProcessGroupNCCL`` that is used. An abort waits for ``let_go``."""

    def __init__(self):
        self.error, self.gone = ErrorType.SUCCESS, False
        self.aborted, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()

    def get_error(self):
        if self.gone:
            raise RuntimeError("the process group was destroyed")
        return self.error

    def abort(self):
        assert self.let_go.wait(PATIENCE_S)
        self.aborted.set()


# --- the environment --------------------------------------------------------------------------------------------------


def test_the_environment_that_lets_the_watchdog_report():
    assert environment({}) == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
        "TORCH_NCCL_PROPAGATE_ERROR": "1",
        "TORCH_FR_BUFFER_SIZE": "512",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        {"NCCL_ASYNC_ERROR_HANDLING": "0"},
        {"TORCH_NCCL_PROPAGATE_ERROR": "False"},
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
        {"TORCH_NCCL_ENABLE_MONITORING": "no"},
        {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "199"},
        {"TORCH_DISTRIBUTED_DEBUG": "INFO"},
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5", "TORCH_NCCL_DESYNC_DEBUG": "0"},
    ],
)
def test_an_explicit_value_that_fits_is_kept(given):
    added = environment(given)
    assert not added.keys() & given.keys()
    # An older name that the user set is not overruled by the newer one, which would count more.
    older = {"NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & given.keys()
    assert len(added) == len(environment({})) - len(environment({}).keys() & given.keys()) - len(older)
    assert environment({**given, **added}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        ("NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true"),
        ("TORCH_NCCL_ENABLE_MONITORING", ""),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"),
        ("TORCH_FR_BUFFER_SIZE", "many"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_DESYNC_DEBUG", "Y"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_an_explicit_value_that_contradicts_is_reported(name, value):
    with pytest.raises(ConfigError, match=f"{name}='{value}' must match .*, because .*; unset it"):
        environment({name: value})


def test_all_contradictions_are_reported_together():
    with pytest.raises(ConfigError, match=r"BLOCKING_WAIT.*DESYNC_DEBUG"):
        environment({"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"})


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ErrorType.TIMEOUT, "timeout"),
        (ErrorType.COMM_ERROR, "comm_error"),
        (ErrorType.REMOTE_ERROR, "remote_error"),
    ],
)
def test_a_failure_has_a_kind(error, kind):
    backend = Nccl()
    assert failure(backend) is None
    backend.error = error
    assert failure(backend) == (kind, f"the NCCL watchdog reports {error.name}")


def test_a_group_that_is_destroyed_has_not_failed():
    backend = Nccl()
    backend.gone = True
    assert failure(backend) is None


def test_gloo_is_not_asked():
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    assert reporting(group) == []


# --- the end of communicators -----------------------------------------------------------------------------------------


def test_communicators_whose_aborts_wait_for_each_other_are_aborted():
    """As in NCCL, where an abort may wait for a rank that aborts another communicator first."""
    together = threading.Barrier(3, timeout=PATIENCE_S)

    class Tied(Nccl):
        def abort(self):
            together.wait()
            super().abort()

    backends = {name: Tied() for name in ("tp", "dp", "pp")}
    assert abort_all(backends, deadline_s=PATIENCE_S) == ({}, [])
    assert all(backend.aborted.is_set() for backend in backends.values())


def test_an_abort_that_hangs_is_left_behind_and_costs_the_others_nothing():
    backends = {name: Nccl() for name in ("tp", "dp")}
    backends["tp"].let_go.clear()
    assert abort_all(backends, deadline_s=0.2) == ({}, ["tp"])
    assert backends["dp"].aborted.wait(PATIENCE_S) and not backends["tp"].aborted.is_set()
    backends["tp"].let_go.set()
    assert backends["tp"].aborted.wait(PATIENCE_S)


def test_an_abort_that_fails_returns_its_error():
    class Fails(Nccl):
        def abort(self):
            raise RuntimeError("ncclCommAbort failed")

    assert abort_all({"tp": Fails()}, deadline_s=PATIENCE_S) == ({"tp": "RuntimeError: ncclCommAbort failed"}, [])


# --- the names that the watchdog depends on ---------------------------------------------------------------------------


def test_the_installed_torch_has_the_names():
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"} <= set(ErrorType.__members__)
    assert hasattr(dist.ProcessGroup, "abort")
    if torch.version.cuda:
        assert hasattr(dist.ProcessGroupNCCL, "get_error")
