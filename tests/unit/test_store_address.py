"""The address of an etcd: its valid forms; it holds no secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config import schema
from megatron_ft.config.store_address import EtcdAddress
from megatron_ft.errors import ConfigError

HOSTS = st.one_of(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.just("10.0.0.2"), st.just("fd99::1"))
ENDPOINTS = st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=3, unique=True)
PATHS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8).map(lambda name: f"/{name}")


@given(ENDPOINTS, st.booleans(), PATHS, PATHS, PATHS, st.text(min_size=1, max_size=8), PATHS)
def test_a_written_address_reads_back(endpoints, tls, ca, cert, key, user, file):
    address = EtcdAddress(tuple(endpoints), True, ca, cert, key, user, file)
    assert EtcdAddress.parse(str(address)) == address
    plain = EtcdAddress(tuple(endpoints), tls)
    assert EtcdAddress.parse(str(plain)) == plain


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("etcds://h:1?ca=/a&user=u&password=secret", "an address must not hold a password"),
        ("etcds://h:1?user=u&password_file=relative", "password_file is 'relative'; it must be an absolute path"),
        ("etcds://h:1?cert=/a", "names only one of cert and key"),
        ("etcds://h:1?password_file=/a", "names a password_file and no user"),
        ("etcds://h:1?ca=/a&ca=/b", "option ca must be given once"),
        ("etcds://h:1?ca=", "not be empty"),
        ("etcds://h:1?certificate=/a", "option 'certificate' is not known; known are: ca, cert"),
        ("etcd://h:1?user=u", "options need TLS"),
        ("etcd+own://h:1", 'it must be "etcd://HOST:PORT'),
        ("https://h:1", 'it must be "etcd://HOST:PORT'),
    ],
)
def test_a_config_with_a_wrong_address_is_refused_with_the_rule(store, named):
    with pytest.raises(ConfigError, match="fault_tolerance.store is") as caught:
        schema.resolve({"fault_tolerance": {"store": store}}, groups=2)
    assert named in str(caught.value) and "secret" not in str(caught.value)
