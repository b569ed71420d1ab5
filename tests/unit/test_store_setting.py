"""The ``store`` setting, and what doctor says of etcd."""

from __future__ import annotations

import pytest

from megatron_ft import config
from megatron_ft.doctor import local as doctor
from megatron_ft.errors import ConfigError
from megatron_ft.runtime.store import control

THREE = "etcd://node1:2379,10.0.0.2:2379,[::1]:2379"


def resolved(store: object) -> str:
    return config.resolve({"fault_tolerance": {"store": store}}, groups=2).fault_tolerance.store


def test_the_default_is_embedded_and_etcd_names_its_nodes():
    assert config.resolve({}, groups=2).fault_tolerance.store == "embedded"
    assert resolved(THREE) == THREE
    assert control.open_store(THREE, 1.0).name == "etcd://node1:2379,10.0.0.2:2379,::1:2379"


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("etcd", "'etcd'; it must be \"embedded\""),
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
