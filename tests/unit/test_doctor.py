"""The local check of doctor: a real all-reduce, and real imports in processes of their own."""

from __future__ import annotations

import importlib.util
import json

import pytest
from rich.console import Console

from megatron_ft.cluster.doctor import disk, doctor_report
from megatron_ft.cluster.doctor import local as doctor
from megatron_ft.run.collectives import nccl_watchdog


@pytest.mark.long
@pytest.mark.slow
def test_this_machine_can_train(capsys):
    assert doctor.run_doctor(Console(), as_json=True) == 0
    findings = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["gloo"]["state"] == "ok"
    installed = importlib.util.find_spec("deepspeed") is not None
    assert findings["engine deepspeed"]["state"] == ("ok" if installed else "missing")
    assert "AdamW: " in findings["fused kernels"]["details"]


def test_doctor_fails_when_something_needed_is_missing(monkeypatch, capsys):
    for check in ("_torch", "_gloo", "_engines", "_extras"):
        monkeypatch.setattr(doctor, check, lambda: [])  # covered by the test above
    monkeypatch.setattr(doctor, "_base", lambda: [doctor._package("no_such_package", "pip install it", needed=True)])
    monkeypatch.setattr(doctor, "_slurm", lambda: [doctor._package("not_there_either", "get it")])
    assert doctor.run_doctor(Console(width=200)) == 1
    *table, last = capsys.readouterr().out.splitlines()
    assert last == "not ready; missing: no_such_package; pip install it"
    assert any("not_there_either" in line and "optional" in line for line in table)


def test_packages_that_crash_on_import_are_findings(tmp_path, monkeypatch):
    """PyPI's apex fails to import; a compiled package can end its process."""
    (tmp_path / "apex.py").write_text("import pyramid_is_not_here")
    (tmp_path / "crashes.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    apex = doctor._apex()
    assert apex.state == "broken" and "github.com/NVIDIA/apex" in apex.remedy and "PyPI" in apex.remedy
    crashed = doctor._package("crashes", "pip install it", needed=True)
    assert crashed.state == "broken" and crashed.details


def test_a_directory_is_tested_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda begun: [])
    assert doctor.run_doctor(Console(width=200), directory=tmp_path) == 0
    shown = capsys.readouterr().out
    assert "GB free" in shown and shown.endswith("ready: training can start on this machine\n")
    assert doctor.run_doctor(Console(width=200), directory=tmp_path / "nothing") == 1


def test_a_directory_without_hard_links_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda begun: [])
    monkeypatch.setattr(disk, "_no_links", lambda path: "Operation not permitted")
    assert doctor.run_doctor(Console(), as_json=True, directory=tmp_path) == 0
    _, links = json.loads(capsys.readouterr().out)
    assert links["state"] == "warn" and links["details"] == f"{tmp_path} has none: Operation not permitted"
    assert "no host takes over the embedded store" in links["remedy"]


def test_the_table_keeps_brackets(capsys):
    """rich would take [track] for markup."""
    Console(width=120).print(
        doctor_report.table("", ("what", "remedy"), [("wandb", "pip install 'megatron_ft[track]'")])
    )
    assert "'megatron_ft[track]'" in capsys.readouterr().out


def test_a_gloo_that_hangs_is_ended_at_the_deadline(monkeypatch):
    monkeypatch.setattr(doctor, "_GLOO_TEST", "import signal; signal.pause()")
    monkeypatch.setattr(doctor, "_DEADLINE_S", 0.2)
    (finding,) = doctor._gloo()
    assert finding.state == "broken" and "no answer within 0.2 s" in finding.details


def test_an_interface_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor._interfaces() == []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib7")
    (finding,) = doctor._interfaces()
    assert finding.state == "broken" and finding.needed
    assert "GLOO_SOCKET_IFNAME=lo,ib7: this host has no ib7; it has" in finding.details


def test_the_environment_of_nccl_is_shown(monkeypatch):
    for name in nccl_watchdog.names():
        monkeypatch.delenv(name, raising=False)
    found = doctor._nccl_environment()
    assert found.state == "ok" and "TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in found.details
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "4096")
    found = doctor._nccl_environment()
    assert "your own values stay: TORCH_FR_BUFFER_SIZE=4096" in found.details
    assert "TORCH_FR_BUFFER_SIZE=512" not in found.details
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    found = doctor._nccl_environment()
    assert found.state == "broken" and found.needed and "with it NCCL starts no watchdog" in found.details
