"""Data URLs as clients really write them."""

import base64
import tracemalloc

import pytest

from k3_gateway.data_url import decode_data_url, is_data_url
from k3wire.errors import EmptyImageFile, ImageFileTooLarge, InvalidBase64Image

DATA = bytes(range(256))
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/png;BASE64,{TEXT}",
        f"  data:image/png;charset=utf-8;base64,{TEXT}\n",
        f"data:;base64,{TEXT.rstrip('=')}",
        f"data:image/jpeg;base64,{TEXT[:40]}\r\n{TEXT[40:]}",
        f"data:image/png;base64,{TEXT.replace('+', '%2B').replace('/', '%2F')}",
    ],
)
def test_forms_of_the_rfc_decode_to_the_bytes(url: str) -> None:
    assert is_data_url(url)
    assert decode_data_url(url, 1000, "p") == DATA


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png,{TEXT}",
        f"data:image/png;base64{TEXT}",
        "data:image/png;base64,a",
        "data:image/png;base64,@@@@",
        f"data:image/png;base64,{TEXT.replace('+', '-').replace('/', '_')}",
        "data:image/png;base64,\u00e9\u00e9\u00e9\u00e9",
    ],
)
def test_other_forms_are_refused_with_the_part_named(url: str) -> None:
    with pytest.raises(InvalidBase64Image) as caught:
        decode_data_url(url, 1000, "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    assert TEXT[:20] not in caught.value.message


def test_a_long_text_without_a_comma_is_refused_unread() -> None:
    url = "data:" + ";" * 1_000_000
    tracemalloc.start()
    with pytest.raises(InvalidBase64Image):
        decode_data_url(url, 1000, "p")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 100_000


@pytest.mark.parametrize("payload", ["", "  ", "===="])
def test_a_payload_without_bytes_is_an_empty_image(payload: str) -> None:
    with pytest.raises(EmptyImageFile):
        decode_data_url(f"data:image/png;base64,{payload}", 1000, "p")


@pytest.mark.parametrize("limit", [255, 10])
def test_bytes_over_the_limit_are_refused(limit: int) -> None:
    with pytest.raises(ImageFileTooLarge):
        decode_data_url(f"data:image/png;base64,{TEXT}", limit, "p")


def test_plain_text_and_paths_are_no_data_urls() -> None:
    assert not any(is_data_url(text) for text in (TEXT, "/etc/passwd", "https://a/b.png", ""))


def test_usual_escapes_are_undone_in_any_number_and_others_only_in_few() -> None:
    data = bytes(range(256)) * 400
    text = base64.b64encode(data).decode()
    escaped = text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    assert decode_data_url(f"data:image/png;base64,{escaped}", 10**6, "p") == data
    few = "".join(f"%{ord(char):02x}" for char in text[:400]) + text[400:]
    assert decode_data_url(f"data:image/png;base64,{few}", 10**6, "p") == data
    with pytest.raises(InvalidBase64Image, match="percent escapes"):
        decode_data_url("data:image/png;base64," + "%41" * 20_000, 10**6, "p")
