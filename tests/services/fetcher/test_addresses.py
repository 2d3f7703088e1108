"""Addresses: what may be connected to, judged as numbers."""

import pytest

from k3_fetcher.addresses import AddressPolicy, parse_networks

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "93.184.216.34", "100.63.255.255", "100.128.0.0", "172.15.255.255",
    "172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0",
    "223.255.255.255", "168.63.129.15", "168.63.129.17", "2606:4700::1111", "2001:200::1",
    "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1",
]  # fmt: skip
PRIVATE = [
    "0.0.0.0", "0.255.255.255", "10.0.0.1", "10.255.255.255", "100.64.0.0", "100.100.100.200",
    "100.127.255.255", "127.0.0.1", "127.255.255.255", "169.254.169.254", "169.254.0.1",
    "172.16.0.0", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1",
    "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16",
    "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1",
    "2001::1", "2001:1ff::1", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::",
    "3fff::1", "5f00::1", "4000::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0",
    "febf::1", "fec0::1", "ff02::1", "ff0e::1", "2606:4700::1111%1", "", "no address", "127.1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_fet_04_public_addresses_pass(address: str) -> None:
    assert AddressPolicy((), ()).permits(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_fet_04_everything_else_is_refused(address: str) -> None:
    assert not AddressPolicy((), ()).permits(address)


def test_fet_04_an_operator_opens_and_closes_networks() -> None:
    policy = AddressPolicy(
        parse_networks(["10.1.0.0/16", "::1/128"]), parse_networks(["10.1.2.0/24", "8.8.8.0/24"])
    )
    judged = ["10.1.0.1", "10.2.0.1", "10.1.2.3", "8.8.8.8", "1.1.1.1", "::1", "::ffff:10.1.0.1"]
    assert [policy.permits(address) for address in judged] == [
        True, False, False, False, True, True, True,
    ]  # fmt: skip
    assert [policy.is_opened(address) for address in ("10.1.0.1", "1.1.1.1")] == [True, False]


def test_fet_04_a_malformed_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0/33"):
        parse_networks(["10.0.0/33"])
