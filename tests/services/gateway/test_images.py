"""Images of a request that is refused: the first failure is the request's, and nothing stays."""

import asyncio
import base64
import gc
import weakref

import pytest
from support.chat_gateway import chat_body, chat_gateway
from support.raw_png import SIGNATURE, chunk, header

from k3_gateway.chat_request import bodies
from k3_gateway.chat_request.messages import ImageInput
from k3_gateway.images import ImageResolver
from k3text.images.config import ProcessorConfig
from k3text.images.keys import content_key
from k3wire import subjects
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.bus.base import Headers
from k3wire.bus.memory import MemoryBus
from k3wire.errors import ImageError, InvalidImageUrl
from k3wire.messages.base import StageReport
from k3wire.messages.fetch import MAX_URL_CHARS, ResolveReply, ResolveRequest
from k3wire.messages.media import ImageRef
from k3wire.service.pieces import PieceHolder

FAR_NS = 1 << 62


class Inputs(list[ImageInput]):
    """A list that can be referred to weakly: it stands for the body of its request."""


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image_resolver(pieces: PieceHolder) -> ImageResolver:
    return ImageResolver(
        bus=MemoryBus(),
        store=MemoryBlobStore(),
        pieces=pieces,
        config=ProcessorConfig(),
        worker_id="gateway-1",
        max_image_bytes=1000,
        ttl_s=60,
    )


async def test_a_url_that_no_fetcher_would_take_is_refused_before_it_is_sent() -> None:
    image = ImageInput(url="https://example.org/" + "a" * MAX_URL_CHARS, param="images[0]")
    resolver = image_resolver(PieceHolder("k3.pieces"))
    with pytest.raises(InvalidImageUrl, match=str(MAX_URL_CHARS)) as refused:
        async with resolver.resolve([image], "r", "", FAR_NS):
            pass
    assert refused.value.param == "images[0]"


async def test_a_data_url_is_the_gateways_work_and_no_fetchers() -> None:
    data = SIGNATURE + header(1, 1, 8, 2) + chunk(b"IDAT", b"x")
    parts = [{"type": "image_url", "image_url": {"url": data_url(data)}}]
    async with asyncio.timeout(10), chat_gateway() as gateway:
        answers = [await gateway.post(chat_body(parts)) for _ in range(2)]
        held_bytes = gateway.pieces.size_bytes
    rows = [
        [(line["stage"], line["tier"], line["outcome"]) for line in lines]
        for lines in (answer["usage"]["k3_ttft_ledger"]["lines"] for _, answer in answers)
    ]
    own = ("gateway", "none", "miss")
    assert rows == [[own, ("gateway", "L1", "miss")], [own, ("gateway", "L1", "hit")]]
    assert held_bytes == 0


async def test_only_pictures_may_be_as_long_as_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_TEXT_BYTES", 100_000)
    url = data_url(SIGNATURE + header(1, 1, 8, 2) + chunk(b"IDAT", bytes(200_000)))
    picture = {"type": "image_url", "image_url": url}
    text = {"type": "text", "text": url}
    async with asyncio.timeout(10), chat_gateway() as gateway:
        found = [await gateway.post(chat_body([part])) for part in (picture, text)]
        assert gateway.pieces.size_bytes == 0
    assert [status for status, _ in found] == [200, 413]
    assert found[1][1]["error"]["code"] == "request_too_large"


def answered(request: ResolveRequest, width: int) -> ResolveReply:
    """What a fetcher says of a picture that is one pixel high."""
    return ResolveReply(
        image=ImageRef(
            content_key=content_key(request.url.encode()),
            media_type="image/png",
            width=width,
            height=1,
            size_bytes=1,
            url=request.url,
        ),
        report=StageReport(
            stage="fetcher", outcome="miss", worker_id="f", start_unix_ns=0, duration_ns=0
        ),
    )


def urls(count: int) -> list[ImageInput]:
    return [
        ImageInput(url=f"https://a.example/{number}", param=f"images[{number}]")
        for number in range(count)
    ]


async def test_fet_16_eight_pictures_are_asked_for_at_once_and_keep_their_order() -> None:
    resolver = image_resolver(PieceHolder("k3.pieces"))
    waiting: list[asyncio.Future[None]] = []
    most = 0

    async def answer(request: ResolveRequest, headers: Headers) -> ResolveReply:
        nonlocal most
        waiting.append(asyncio.get_running_loop().create_future())
        most = max(most, len(waiting))
        if len(waiting) == 8 or request.url.endswith("/18"):
            # One too many would come now. The latest is answered first.
            for _ in range(50):
                await asyncio.sleep(0)
            while waiting:
                waiting.pop().set_result(None)
        else:
            await waiting[-1]
        return answered(request, 1 + int(request.url.rpartition("/")[2]))

    await resolver.bus.serve(subjects.shared(subjects.RESOLVE), subjects.RESOLVE, answer)
    async with asyncio.timeout(5), resolver.resolve(urls(19), "r", "", FAR_NS) as found:
        assert [size.width for size in found.sizes] == list(range(1, 20))
    assert most == 8


async def test_fet_16_the_first_failure_ends_the_request_and_its_siblings() -> None:
    resolver = image_resolver(PieceHolder("k3.pieces"))
    asked: list[str] = []

    async def answer(request: ResolveRequest, headers: Headers) -> ResolveReply:
        asked.append(request.param)
        if request.param == "images[7]":
            raise InvalidImageUrl("no", param=request.param)
        await asyncio.Event().wait()
        raise AssertionError("nobody is answered")

    await resolver.bus.serve(subjects.shared(subjects.RESOLVE), subjects.RESOLVE, answer)
    async with asyncio.timeout(5):
        with pytest.raises(InvalidImageUrl) as refused:
            async with resolver.resolve(urls(20), "r", "", FAR_NS):
                pass
    assert refused.value.param == "images[7]"
    # The next one may begin before the failure is heard of.
    assert len(asked) <= 9


async def test_pre_14_pictures_that_do_not_fit_the_context_cost_their_headers_only() -> None:
    data = SIGNATURE + header(4096, 4096, 8, 2) + chunk(b"IDAT", b"no pixels")
    parts = [{"type": "image_url", "image_url": {"url": data_url(data)}}] * 7
    async with asyncio.timeout(10), chat_gateway() as gateway:
        status, answer = await gateway.post(chat_body(parts))
        assert (gateway.asked, gateway.pieces.size_bytes) == ([], 0)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    # Seven times 16,641.
    assert "116487" in answer["error"]["message"]


@pytest.mark.parametrize("num_images", [1, 3, 20])
async def test_a_refused_request_is_freed_by_its_counts_alone(num_images: int) -> None:
    # Bodies are up to a hundred megabytes: refused ones must not wait for the garbage collector.
    pieces = PieceHolder("k3.pieces")
    resolver = image_resolver(pieces)

    async def refuse() -> "tuple[str | None, weakref.ref[Inputs]]":
        images = Inputs(
            ImageInput(url=data_url(b"no picture %d" % number), param=f"images[{number}]")
            for number in range(num_images)
        )
        # Not pytest's own way: what it keeps of an error holds this frame, and so the images.
        try:
            async with resolver.resolve(images, "r", "", FAR_NS):
                return "there is no picture", weakref.ref(images)
        except ImageError as error:
            return error.param, weakref.ref(images)

    gc.collect()
    gc.disable()
    try:
        param, left = await refuse()
        # The loop lets go of a task a turn after its end.
        for _ in range(5):
            await asyncio.sleep(0)
        assert (param, left()) == ("images[0]", None)
    finally:
        gc.enable()
    assert pieces.size_bytes == 0
