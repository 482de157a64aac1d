"""Hosts and ports as people write them."""

from __future__ import annotations

import pytest

from kvrelay.shared.errors import ConfigError
from kvrelay.shared.ports import authority, check_listen, is_wildcard, plain_host

WILD = ["", "*", "0", "0.0", "0.0.0.0", "00.0.0.0", "000.0.0.0", "::", "[::]", "::0"]
WILD += ["0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]
TAME = ["127.0.0.1", "10.0.0.7", "::1", "[::1]", "fe80::1", "localhost", "worker-0.workers", "1"]


@pytest.mark.parametrize("host", WILD)
def test_a_wildcard_is_one_however_it_is_spelled(host: str) -> None:
    assert is_wildcard(host)


@pytest.mark.parametrize("host", TAME)
def test_what_others_can_reach_is_none(host: str) -> None:
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["a\0b", "\ud800"])
def test_what_is_no_host_at_all_is_no_wildcard(host: str) -> None:
    assert not is_wildcard(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "fe80::1%lo", *TAME[:3], *TAME[4:-1]])
def test_a_plain_host_stays_as_it_is(host: str) -> None:
    assert plain_host(host) == host
    assert plain_host("[::1]") == "::1"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("0", "an address in full, which would be 0.0.0.0"),
        ("00.0.0.0", "an address in full, which would be 0.0.0.0"),
        ("10.7", "an address in full, which would be 10.0.0.7"),
        ("10.0.0.7:80", "without a port"),
        ("a b", "without a port"),
        ("", "without a port"),
        ("a\0b", "without a port"),
    ],
)
def test_a_host_that_some_libraries_misread_is_refused(host: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"must be a host name or .*{why}"):
        plain_host(host)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert authority("::1", 80) == authority("[::1]", 80) == "[::1]:80"
    assert authority("127.0.0.1", 80) == "127.0.0.1:80"
    assert authority("localhost", 80) == "localhost:80"


@pytest.mark.parametrize(
    ("host", "why"), [("no such host", ""), ("192.0.2.1", "no address of this machine")]
)
def test_a_host_that_is_not_ours_is_named(host: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_listen(host, 0)
    assert str(error.value).startswith(f"host is '{host}': {why}")
