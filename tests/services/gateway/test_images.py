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
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.bus.memory import MemoryBus
from k3wire.errors import ImageError, InvalidImageUrl
from k3wire.messages.fetch import MAX_URL_CHARS
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
