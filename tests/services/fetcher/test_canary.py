"""FET-10: nothing is ever dialled for a refused URL, whatever it is spelled like.

Two witnesses: a canary server on both loopbacks that counts connections, and the interpreter's own
audit of every connect. Ports are no excuse: the canary's is allowed.
"""

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.fetchers import Fetcher, Names, fetcher
from support.picture_host import PictureHost, answer, picture_host
from support.pictures import encode, gradient

from k3wire.errors import ImageError, InvalidImageUrl

PICTURE = encode(gradient(8, 8), "PNG")


@dataclass
class Dialled:
    """Addresses that this process connected to while watching."""

    is_watching: bool = False
    addresses: list[Any] = field(default_factory=list)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and self.is_watching:
            self.addresses.append(arguments[1])


dialled = Dialled()
sys.addaudithook(dialled.note)


@pytest.fixture
async def canary() -> AsyncIterator[PictureHost]:
    async with picture_host() as host, picture_host("::1", host.port) as sixth:
        host.answers["/a.png"] = sixth.answers["/a.png"] = answer(PICTURE)
        yield host
        assert host.num_connections + sixth.num_connections == 0


@contextlib.contextmanager
def nothing_dialled(but: str = "") -> Any:
    dialled.addresses.clear()
    dialled.is_watching = True
    try:
        yield
    finally:
        dialled.is_watching = False
    assert [address for address in dialled.addresses if address[0] != but] == []


LITERALS = [
    "127.0.0.1", "127.1", "127.0.1", "127.0.0.1.", "127.255.255.254", "2130706433", "0x7f000001",
    "0x7f.1", "0x7F.0x0.0x0.0x1", "0177.0.0.1", "0177.1", "017700000001", "0", "0x0", "0.0.0.0",
    "\u2460\u2461\u2466.0.0.1", "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021",
    "%31%32%37.0.0.1", "[::1]", "[0:0:0:0:0:0:0:1]", "[::]", "[::127.0.0.1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::ffff:0:127.0.0.1]", "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2001::1]", "[::1%25lo]", "[::1%lo]", "[fe80::1]",
    "[fec0::1]", "[fd00:ec2::254]", "[ff02::1]", "[100::1]", "[5f00::1]", "[2001:db8::1]",
    "169.254.169.254", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.100.100.200", "168.63.129.16",
    "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "localhost", "LOCALHOST", "localhost.", "a.localhost", "localhost.localdomain",
    "\uff4c\uff4fcalhost", "metadata.google.internal", "metadata", "instance-data", "db.internal",
    "printer.local", "kubernetes.default.svc", "user@127.0.0.1", "good.example@127.0.0.1",
    "good.example\\@127.0.0.1", "127.0.0.1\\@good.example", "good.example#@127.0.0.1",
]  # fmt: skip


async def refuse(found: Fetcher, url: str) -> None:
    with pytest.raises(ImageError) as caught:
        await found.resolve(url)
    # What a name resolved to is nobody's business.
    assert "127.0.0.1" not in caught.value.message
    assert "::1" not in caught.value.message


@pytest.mark.parametrize("host", LITERALS)
async def test_fet_03_fet_10_a_refused_spelling_is_never_dialled(
    canary: PictureHost, host: str
) -> None:
    names = Names({"good.example": [["127.0.0.1"]]})
    async with fetcher(names, allowed_networks=(), allowed_ports=(80, canary.port)) as found:
        with nothing_dialled():
            await refuse(found, f"http://{host}:{canary.port}/a.png")


PRIVATE_ANSWERS = [
    ["127.0.0.1"], ["::1"], ["0.0.0.0"], ["::"], ["::ffff:127.0.0.1"], ["::1%1"],
    ["93.184.216.34", "127.0.0.1"], ["127.0.0.1", "93.184.216.34"],
    ["2606:4700::1111", "::1"], ["169.254.169.254"], [],
]  # fmt: skip


@pytest.mark.parametrize("addresses", PRIVATE_ANSWERS)
async def test_fet_10_a_public_name_with_a_private_address_is_never_dialled(
    canary: PictureHost, addresses: list[str]
) -> None:
    names = Names({"good.example": [addresses]})
    async with fetcher(names, allowed_networks=(), allowed_ports=(canary.port,)) as found:
        with nothing_dialled():
            await refuse(found, f"http://good.example:{canary.port}/a.png")


REDIRECTS = [
    "http://127.0.0.1:{port}/a.png", "http://[::1]:{port}/a.png", "//127.0.0.1:{port}/a.png",
    "http://localhost:{port}/a.png", "http://0x7f.1:{port}/a.png", "http://inside.example:{port}/a",
    "http://[::ffff:127.0.0.1]:{port}/a.png", "http://2130706433:{port}/a.png",
    "http://x@127.0.0.1:{port}/a.png", "\\\\127.0.0.1:{port}\\a.png", "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/", "data:image/png;base64,AAAA", "http://0.0.0.0:{port}/a.png",
    "http://good.example\\@127.0.0.1:{port}/a.png", "http:///127.0.0.1:{port}/a.png",
]  # fmt: skip


@pytest.mark.parametrize("location", REDIRECTS)
async def test_fet_07_fet_10_a_redirect_leads_to_no_private_place(
    canary: PictureHost, location: str
) -> None:
    names = Names({"good.example": [["127.0.0.2"]], "inside.example": [["127.0.0.1"]]})
    async with picture_host("127.0.0.2") as outside:
        ports = (canary.port, outside.port)
        outside.answers["/a.png"] = answer(status=302, Location=location.format(port=canary.port))
        async with fetcher(names, allowed_networks=("127.0.0.2/32",), allowed_ports=ports) as found:
            with nothing_dialled(but="127.0.0.2"):
                await refuse(found, f"http://good.example:{outside.port}/a.png")
        assert outside.num_connections == 1


async def test_fet_05_fet_10_a_name_that_changes_its_mind_is_never_followed_inside(
    canary: PictureHost,
) -> None:
    # First a public answer, then a private one: what was judged is what is dialled, so the second
    # answer must never be asked for.
    names = Names({"good.example": [["127.0.0.2"], ["127.0.0.1"]]})
    async with fetcher(
        names, allowed_networks=("127.0.0.2/32",), allowed_ports=(canary.port,), max_retries=0
    ) as found:
        with nothing_dialled(but="127.0.0.2"):
            await refuse(found, f"http://good.example:{canary.port}/a.png")
    assert names.num_lookups == 1


async def test_fet_10_a_retry_judges_the_name_again(canary: PictureHost) -> None:
    names = Names({"good.example": [["127.0.0.2"], ["127.0.0.1"]]})
    async with fetcher(
        names, allowed_networks=("127.0.0.2/32",), allowed_ports=(canary.port,)
    ) as found:
        with nothing_dialled(but="127.0.0.2"), pytest.raises(InvalidImageUrl):
            await found.resolve(f"http://good.example:{canary.port}/a.png")
    assert names.num_lookups == 2


async def test_fet_10_the_canary_would_sing(tmp_path: Any) -> None:
    # The witnesses see what is there to see.
    async with picture_host() as host, fetcher() as found:
        host.answers["/a.png"] = answer(PICTURE)
        with pytest.raises(AssertionError), nothing_dialled():
            await found.resolve(host.url("/a.png"))
        assert host.num_connections == 1


@pytest.mark.parametrize("port", [22, 25, 6379, 8080])
async def test_fet_02_ports_that_are_not_listed_are_never_dialled(port: int) -> None:
    names = Names({"good.example": [["93.184.216.34"]]})
    async with fetcher(names, allowed_networks=()) as found:
        with nothing_dialled():
            await refuse(found, f"http://good.example:{port}/a.png")


async def test_fet_08_domains_that_are_not_allowed_are_never_dialled() -> None:
    names = Names({name: [["93.184.216.34"]] for name in ("good.example", "good.example.evil.net")})
    async with fetcher(
        names, allowed_domains=("*.fine.example",), denied_domains=("bad.fine.example",)
    ) as found:
        with nothing_dialled():
            for host in ("good.example", "good.example.evil.net", "bad.fine.example"):
                await refuse(found, f"http://{host}/a.png")
    assert names.num_lookups == 0
