"""URLs: what is read of them, and what is refused rather than interpreted."""

import pytest

from k3_fetcher.urls import join, matches_domain, parse_url
from k3wire.errors import InvalidImageUrl


def text_of(url: str) -> str:
    return parse_url(url, "", allows_http=True).text


@pytest.mark.parametrize(
    "url",
    [
        "", "   ", "picture.png", "/etc/passwd", "//host/a.png", "file:///etc/passwd",
        "FILE:///etc/passwd", "ftp://host/a.png", "gopher://host:70/_x", "jar:http://host!/a",
        "blob:http://host/1", "ws://host/a", "javascript:alert(1)", "data", "http:", "http:///a.png",
        "https:host/a.png", "about:blank", "mailto:a@b.example", "ms://file-id",
    ],
)  # fmt: skip
def test_fet_01_other_schemes_and_relative_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidImageUrl):
        parse_url(url, "", allows_http=True)


def test_fet_01_http_is_refused_when_it_is_switched_off() -> None:
    assert parse_url("https://a.example/", "", allows_http=False).scheme == "https"
    with pytest.raises(InvalidImageUrl):
        parse_url("http://a.example/", "", allows_http=False)


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example\\@127.0.0.1/", "http://good.example\\.evil.example/",
        "http:\\\\good.example/a", "http://user@good.example/", "http://user:pass@good.example/",
        "http://a@b@good.example/", "http://good%2eexample/", "http://%31%32%37.0.0.1/",
        "http://good.example%00/", "http://good.example:0/", "http://good.example:65536/",
        "http://good.example:port/", "http://good.example:-1/", "http://good .example/",
        "http://good.example/a b", "http://good.example/a\x00b", "http://good.example/a\nb",
        "http://good.example/\ta", "http://good.\x7fexample/", "http://[::1", "http://::1]/",
        "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[v1.x]/", "http://a..b/",
        "http://.example/", "http://-a.example/", "http://a-.example/", "http://a_" + "b" * 64 + "/",
        "http://" + "a." * 130 + "example/", "http://good.example/" + "a" * 9000, "http://?a=b/",
        "http://#/", "http://[127.0.0.1]/", "http://good.example[2606:4700::1]/",
        "http://[2606:4700::1]good.example/", "http://[2606:4700::1].good.example:80/",
        "http://good\u2215a\u200b\u2024.example/", "http://ex\u2100mple.example/",
    ],
)  # fmt: skip
def test_fet_02_what_parsers_disagree_about_is_refused(url: str) -> None:
    with pytest.raises(InvalidImageUrl):
        parse_url(url, "", allows_http=True)


@pytest.mark.parametrize(
    ("url", "rebuilt"),
    [
        ("HTTP://Good.Example", "http://good.example/"),
        (" https://good.example:443/a ", "https://good.example/a"),
        ("http://good.example:80/a?b=c#d", "http://good.example/a?b=c"),
        ("http://good.example:8080/", "http://good.example:8080/"),
        ("http://good.example./a", "http://good.example/a"),
        ("http://b\u00fccher.example/", "http://xn--bcher-kva.example/"),
        ("http://good\u3002example/", "http://good.example/"),
        ("http://good.example/\u00fc?q=\u00fc", "http://good.example/%C3%BC?q=%C3%BC"),
        ("http://good.example/%41?sig=a%2Fb%3D", "http://good.example/%41?sig=a%2Fb%3D"),
        ("http://93.184.216.34/", "http://93.184.216.34/"),
        ("http://[2606:2800:0220:1::1]:8080/", "http://[2606:2800:220:1::1]:8080/"),
    ],
)
def test_fet_02_a_url_is_rebuilt_in_one_spelling(url: str, rebuilt: str) -> None:
    assert text_of(url) == rebuilt
    assert text_of(rebuilt) == rebuilt


@pytest.mark.parametrize(
    "host",
    [
        "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "127.0.1", "0", "0x0",
        "127.0.0.1.", "1.2.3.4.5", "256.1.1.1", "01.02.03.04",
        "\u2460\u2461\u2466.0.0.1", "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021",
    ],
)  # fmt: skip
def test_fet_03_odd_spellings_of_addresses_are_no_names(host: str) -> None:
    with pytest.raises(InvalidImageUrl):
        parse_url(f"http://{host}/", "", allows_http=True)


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST", "localhost.", "a.localhost", "printer.local", "db.internal",
        "metadata", "metadata.google.internal", "Metadata.Goog", "kubernetes.default",
        "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "instance-data",
        "localhost.localdomain", "router.home.arpa", "\uff4c\uff4fcalhost", "LOCALHO\u017fT",
    ],
)  # fmt: skip
def test_fet_03_names_of_this_machine_and_its_cloud_are_known(host: str) -> None:
    assert parse_url(f"http://{host}/", "", allows_http=True).is_blocked_name


@pytest.mark.parametrize("host", ["localhost.example", "mylocalhost", "internal.example"])
def test_fet_03_names_that_only_look_like_them_are_not(host: str) -> None:
    assert not parse_url(f"http://{host}/", "", allows_http=True).is_blocked_name


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b.png", "https://a.example/b.png"),
        ("b.png?x", "https://a.example/dir/b.png?x"),
        ("../b.png", "https://a.example/b.png"),
        ("//b.example/c", "https://b.example/c"),
        ("https://b.example:8443/c", "https://b.example:8443/c"),
        ("#top", "https://a.example/dir/page"),
        # Bytes that are no UTF-8, as the HTTP client gives them.
        ("/caf\udce9.png?\udcff", "https://a.example/caf%E9.png?%FF"),
    ],
)
def test_fet_07_redirects_are_read_against_where_they_came_from(location: str, target: str) -> None:
    base = parse_url("https://a.example/dir/page", "", allows_http=True)
    assert join(base, location, "", allows_http=True).text == target


@pytest.mark.parametrize(
    "location",
    ["http://a.example/", "file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://a.example/",
     "http:/a", "//user@a.example/", "\\\\a.example\\b", "https://a.example\\@127.0.0.1/",
     "http://[", "https://[::1", "https://\u2100/", "https://caf\udce9.example/", "/\ud800"],
)  # fmt: skip
def test_fet_07_redirects_to_worse_places_are_refused(location: str) -> None:
    base = parse_url("https://a.example/dir/page", "", allows_http=True)
    with pytest.raises(InvalidImageUrl):
        join(base, location, "", allows_http=True)


@pytest.mark.parametrize(
    ("host", "pattern", "is_match"),
    [
        ("example.com", "example.com", True),
        ("example.com", "Example.COM.", True),
        ("a.example.com", "example.com", False),
        ("a.example.com", "*.example.com", True),
        ("b.a.example.com", "*.example.com", True),
        ("example.com", "*.example.com", False),
        ("example.com.evil.net", "example.com", False),
        ("example.com.evil.net", "*.example.com", False),
        ("evilexample.com", "*.example.com", False),
        ("evilexample.com", "example.com", False),
    ],
)
def test_fet_08_domains_match_whole_labels(host: str, pattern: str, is_match: bool) -> None:
    assert matches_domain(host, [pattern]) is is_match
