"""How long an image may be used without asking, from its headers."""

from email.utils import formatdate

import pytest
from multidict import CIMultiDict

from k3_fetcher.freshness import Freshness, read_freshness, retry_after_s

DAY_S = 86400.0


def read(**headers: str) -> Freshness:
    named = CIMultiDict((name.replace("_", "-"), value) for name, value in headers.items())
    return read_freshness(named, 60.0, DAY_S)


@pytest.mark.parametrize(
    ("headers", "ttl_s"),
    [
        ({}, 60),
        ({"Cache_Control": "max-age=120"}, 120),
        ({"Cache_Control": "MAX-AGE=120"}, 120),
        ({"Cache_Control": 'max-age="120"'}, 120),
        ({"Cache_Control": "public, max-age=120, s-maxage=30"}, 30),
        ({"Cache_Control": "max-age=120", "Age": "100"}, 20),
        ({"Cache_Control": "max-age=120", "Age": "500"}, 0),
        ({"Cache_Control": "max-age=120", "Age": "nonsense"}, 120),
        ({"Cache_Control": "max-age=99999999999"}, DAY_S),
        ({"Cache_Control": "max-age=-5"}, 0),
        ({"Cache_Control": "max-age=soon"}, 0),
        ({"Cache_Control": "max-age"}, 0),
        ({"Cache_Control": "no-cache"}, 0),
        ({"Cache_Control": "no-cache, max-age=120"}, 0),
        ({"Cache_Control": "max-age=120, must-revalidate"}, 120),
        ({"Cache_Control": "private, max-age=120"}, 120),
        ({"Cache_Control": "no-store, max-age=120"}, 0),
        ({"Vary": "*"}, 0),
        ({"Vary": "Accept, *"}, 0),
        ({"Vary": "Accept-Encoding"}, 60),
        ({"Expires": "0"}, 0),
        ({"Expires": "nonsense"}, 0),
        ({"Expires": formatdate(2000, usegmt=True), "Date": formatdate(1700, usegmt=True)}, 300),
        ({"Expires": formatdate(1000, usegmt=True), "Date": formatdate(1700, usegmt=True)}, 0),
        ({"Expires": formatdate(2000), "Date": formatdate(1700), "Cache_Control": "max-age=5"}, 5),
    ],
)
def test_fet_21_freshness_follows_the_headers(headers: dict[str, str], ttl_s: float) -> None:
    assert read(**headers).ttl_s == ttl_s


def test_fet_21_what_must_not_be_stored_is_known() -> None:
    assert not read(Cache_Control="no-store").is_storable
    assert read(Cache_Control="no-cache").is_storable


def test_fet_21_validators_are_kept() -> None:
    found = read(ETag='W/"1"', Last_Modified="Sat, 29 Nov 2025 00:00:00 GMT")
    assert (found.etag, found.last_modified) == ('W/"1"', "Sat, 29 Nov 2025 00:00:00 GMT")


def test_fet_21_validators_that_are_no_text_are_as_good_as_none() -> None:
    found = read(ETag='"\udce9"', Last_Modified="Sat\udcff")
    assert (found.etag, found.last_modified) == ("", "")


@pytest.mark.parametrize(
    ("text", "wait_s"), [("", 0), ("7", 7), ("-3", 0), ("soon", 0), (formatdate(5), 0)]
)
def test_fet_13_a_hosts_wish_to_wait_is_read(text: str, wait_s: float) -> None:
    assert retry_after_s({"Retry-After": text} if text else {}) == wait_s
