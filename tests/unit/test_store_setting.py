"""The ``store`` setting."""

from __future__ import annotations

import argparse
import json

import pytest

from megatron_ft.cluster.launchers import host_place
from megatron_ft.config import schema
from megatron_ft.config.schema import RunConfig
from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.host import join, operator_requests
from megatron_ft.run.store import run_store

THREE = "etcd://node1:2379,10.0.0.2:2379,[::1]:2379"


def resolved(store: object) -> str:
    return schema.resolve({"fault_tolerance": {"store": store}}, groups=2).fault_tolerance.store


def test_the_default_is_embedded_and_etcd_names_its_nodes():
    assert schema.resolve({}, groups=2).fault_tolerance.store == resolved("embedded") == resolved("auto") == "embedded"
    assert resolved(THREE) == THREE
    assert run_store.open_store(THREE, 1.0).name == "etcd://node1:2379,10.0.0.2:2379,::1:2379"


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("etcd3", '\'etcd3\'; it must be "embedded" or "etcd://'),
        ("etcd", "leave it out for the embedded store, which survives the same losses, or give"),
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


def test_the_command_line_selects_the_store_of_one_launch():
    run = schema.resolve({}, groups=2)
    options = argparse.Namespace(store=THREE)
    assert host_place.with_store(options, run).fault_tolerance.store == THREE and options.store is None
    options = argparse.Namespace(store="node0:29400")
    assert host_place.with_store(options, run) is run and options.store == "node0:29400"
    for refused, why in (("etcd://node1", "is no HOST:PORT"), ("etcd", "leave it out for the embedded store")):
        with pytest.raises(ConfigError, match=f"--store is .*{why}"):
            host_place.with_store(argparse.Namespace(store=refused), run)


@pytest.mark.parametrize("word", ["auto", "embedded"])
def test_the_option_takes_the_words_of_the_setting(word):
    run = schema.resolve({"fault_tolerance": {"store": "etcd://node1:2379"}}, groups=3)
    options = argparse.Namespace(store=word)
    assert host_place.with_store(options, run).fault_tolerance.store == "embedded" and options.store is None


@pytest.mark.parametrize("word", ["auto", "etcd"])
def test_the_record_of_an_earlier_version_can_be_read(word):
    raw = schema.resolve({}, groups=2).to_json()
    raw["fault_tolerance"]["store"] = word
    assert RunConfig.from_json(raw).fault_tolerance.store == "embedded"


def test_a_live_run_with_an_etcd_of_its_own_is_refused_to_commands(tmp_path):
    config = schema.resolve({}, groups=2).to_json()
    how = {"run_id": "run", "job": "only", "hosts": 3, "host": "n0", "directory": "/", "command": ["train.py"]}
    known = {operator_requests.STORE_KEY: "etcds+own://10.0.0.1:23,10.0.0.2:23?ca=/run/etcd/ca.pem"}
    (tmp_path / "config.json").write_text(json.dumps(config | how | known))
    with pytest.raises(
        LaunchError, match="is of an earlier version and has started an etcd of its own; use that version"
    ):
        join.find(tmp_path)
