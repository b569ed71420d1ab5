"""The ``store`` setting, and what doctor says of etcd."""

from __future__ import annotations

import argparse

import pytest

from megatron_ft import config
from megatron_ft.doctor import local as doctor
from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.launch import etcd_binary, hosts, record, which_host
from megatron_ft.runtime.store import control

THREE = "etcd://node1:2379,10.0.0.2:2379,[::1]:2379"


def resolved(store: object) -> str:
    return config.resolve({"fault_tolerance": {"store": store}}, groups=2).fault_tolerance.store


def test_the_default_is_embedded_and_etcd_names_its_nodes_or_is_the_runs_own():
    assert config.resolve({}, groups=2).fault_tolerance.store == "embedded"
    assert resolved(THREE) == THREE
    assert resolved("etcd") == "etcd"
    assert control.open_store(THREE, 1.0).name == "etcd://node1:2379,10.0.0.2:2379,::1:2379"


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("etcd3", "'etcd3'; it must be \"embedded\", \"etcd\" or \"etcd://"),
        ("etcd://", "'' is no HOST:PORT"),
        ("etcd://node1", "'node1' is no HOST:PORT"),
        ("etcd://node1:2379,", "'' is no HOST:PORT"),
        ("etcd://node1:70000", "'node1:70000' is no HOST:PORT"),
        ("etcd://http://node1:2379", "no HOST:PORT"),
        ("etcd://node1:2379,node1:2379", "names a node twice"),
        (3, "must be a str"),
    ],
)
def test_what_is_not_an_address_is_refused_with_the_rule(store, named):
    with pytest.raises(ConfigError, match="fault_tolerance.store is") as caught:
        resolved(store)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("script", "state", "details"),
    [
        ('echo "etcd Version: 3.4.23"', "ok", "3.4.23"),
        ('echo "etcd Version: 3.3.1"', "broken", "has no /v3 gateway"),
        ("echo no libc >&2; exit 1", "broken", "no libc"),
    ],
)
def test_doctor_asks_etcd_for_its_version(tmp_path, monkeypatch, script, state, details):
    (tmp_path / "etcd").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "etcd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = doctor._etcd()
    assert finding.state == state and details in finding.details


def test_doctor_says_how_to_get_etcd(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor._etcd()
    assert finding.state == "missing" and "apt-get install etcd-server" in finding.remedy and not finding.needed


def fake_etcd(directory, script: str):
    program = directory / "etcd"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def launch(run, store=None, count=3, rank=0):
    """The check of a launch, after its options have been read."""
    options = argparse.Namespace(store=store, hosts=count, host_rank=rank)
    which_host.check_store(options, which_host.with_store(options, run))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "etcd Version: 3.3.25"', "3.3.25 has no /v3 gateway. On the first 3 hosts, .*: etcd 3.4 or newer"),
        ("echo no libc >&2; exit 1", "no libc. On the first 3 hosts, .*: reinstall"),
        (None, "no etcd on PATH. On the first 3 hosts, .*: as root: apt-get install etcd-server, or name the program in"),
    ],
)
def test_a_run_that_cannot_start_its_own_says_so_before_anything_is_started(tmp_path, monkeypatch, script, said):
    if script is not None:
        fake_etcd(tmp_path, script)
    monkeypatch.delenv(etcd_binary.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:/bin:/usr/bin")
    run = config.resolve({"fault_tolerance": {"store": "etcd"}}, groups=6)
    with pytest.raises(LaunchError, match=said):
        launch(run)
    launch(run, count=4, rank=3)  # keeps no member
    launch(config.resolve({}, groups=6))  # needs none


def test_another_etcd_may_be_named(tmp_path, monkeypatch):
    program = fake_etcd(tmp_path, 'echo "etcd Version: 3.5.9"')
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv(etcd_binary.VARIABLE, str(program))
    assert etcd_binary.find() == (str(program), "3.5.9")
    monkeypatch.setenv(etcd_binary.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(etcd_binary.EtcdMissing, match="MEGATRON_FT_ETCD is .*none', which is no program"):
        etcd_binary.find()


@pytest.mark.parametrize("count", [None, 1, 2])
def test_fewer_than_three_hosts_have_no_store_of_their_own(count):
    with pytest.raises(LaunchError, match=r"there are \d hosts \(spare ones do not count\); its 3 members need"):
        launch(config.resolve({"fault_tolerance": {"store": "etcd"}}, groups=2), count=count)


def test_the_command_line_says_which_store_for_one_launch():
    run = config.resolve({}, groups=2)
    options = argparse.Namespace(store=THREE)
    assert which_host.with_store(options, run).fault_tolerance.store == THREE and options.store is None
    options = argparse.Namespace(store="node0:29400")
    assert which_host.with_store(options, run) == run and options.store == "node0:29400"
    with pytest.raises(ConfigError, match="is no HOST:PORT"):
        which_host.with_store(argparse.Namespace(store="etcd://node1"), run)


def test_what_the_environment_says_of_etcd_and_proxies_is_not_for_the_runs_own(monkeypatch):
    monkeypatch.setenv("ETCD_DATA_DIR", "/elsewhere")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("ETCD_UNSUPPORTED_ARCH", "arm64")
    found = etcd_binary.environment()
    assert "ETCD_DATA_DIR" not in found and "https_proxy" not in found
    assert found["ETCD_UNSUPPORTED_ARCH"] == "arm64" and "PATH" in found


def test_hosts_of_a_run_with_its_own_need_neither_an_address_of_the_store_nor_a_name(tmp_path, monkeypatch):
    fake_etcd(tmp_path, 'echo "etcd Version: 3.4.23"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = config.resolve({"fault_tolerance": {"store": "etcd"}}, groups=3)
    run_dir = tmp_path / "run"
    first = hosts.place(3, 0, "127.0.0.1", None, 0, None, run, run_dir)
    assert (first.store, first.address, first.late) == ("etcd", "127.0.0.1", False)
    (run_dir / record.ETCD).mkdir(parents=True)
    (run_dir / record.ETCD / "0.json").write_text('{"address": "127.0.0.1"}')
    assert hosts.place(3, 1, None, None, 0, None, run, run_dir).address == "127.0.0.1", "on the way to host 0"
    assert hosts.place(3, 2, None, "127.0.0.1:29400", 0, None, run, run_dir).store == "etcd", "it says where host 0 is"
    with pytest.raises(LaunchError, match="there are 2 hosts"):
        hosts.place(2, 0, "127.0.0.1", None, 0, None, run, run_dir)
