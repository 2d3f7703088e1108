import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_images import RGB, Case, all_cases
from support.pictures import encode

from k3text.images.header import (
    DEFAULT_MEDIA_TYPES,
    OPTIONAL_MEDIA_TYPES,
    ImageHeader,
    ImageLimits,
    read_header,
    sniff,
)
from k3wire.errors import (
    EmptyImageFile,
    ImageError,
    ImageFileTooLarge,
    ImageTooLarge,
    UnsupportedImageMediaType,
)

ALL = ImageLimits(media_types=DEFAULT_MEDIA_TYPES | OPTIONAL_MEDIA_TYPES)
CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pre_01_pre_14_a_header_gives_the_size_as_seen_or_an_error_of_the_image_family(
    case: Case,
) -> None:
    found: ImageHeader | str
    try:
        found = read_header(case.data, ALL)
    except ImageError as error:
        found = error.code
    if isinstance(found, str):
        assert found == case.code
    elif not case.code:
        header = found
        size = case.size or (case.picture.shape[1], case.picture.shape[0])  # pyright: ignore[reportOptionalMemberAccess]
        assert (header.width, header.height) == size


@pytest.mark.parametrize("case", [c for c in CASES if c.code and c.code != "image_parse_error"], ids=lambda case: case.name)  # fmt: skip
def test_pre_01_pre_10_everything_but_damage_is_refused_by_the_header_alone(case: Case) -> None:
    with pytest.raises(ImageError) as raised:
        read_header(case.data, ALL)
    assert raised.value.code == case.code


@pytest.mark.parametrize("form", ["BMP", "TIFF", "AVIF"])
def test_pre_09_formats_of_the_switch_are_refused_by_default(form: str) -> None:
    data = encode(RGB, form)
    with pytest.raises(UnsupportedImageMediaType) as raised:
        read_header(data)
    assert raised.value.message == "Images must be JPEG, PNG, GIF or WebP"
    assert read_header(data, ALL).media_type == f"image/{form.lower()}"


def test_pre_04_frames_are_counted_and_nothing_else_of_them_matters() -> None:
    counts = {case.name: read_header(case.data, ALL).num_frames for case in CASES if not case.code}
    assert counts["gif of 600 frames"] == 600
    assert counts["apng"] == counts["webp animated"] == counts["tiff of two pages"] == 2
    assert counts["png rgb 8"] == 1


def test_pre_01_limits_hold_to_the_pixel_and_the_byte() -> None:
    data = encode(RGB, "PNG")
    fits = ImageLimits(max_bytes=len(data), max_pixels=37 * 23, max_side=37)
    assert read_header(data, fits) == ImageHeader("image/png", 37, 23)
    with pytest.raises(ImageFileTooLarge):
        read_header(data, ImageLimits(max_bytes=len(data) - 1))
    with pytest.raises(ImageTooLarge):
        read_header(data, ImageLimits(max_pixels=37 * 23 - 1))
    with pytest.raises(ImageTooLarge):
        read_header(data, ImageLimits(max_side=36))


def test_an_error_names_the_part_of_the_request() -> None:
    with pytest.raises(EmptyImageFile) as raised:
        read_header(b"", param="messages[0].content[1].image_url")
    assert raised.value.param == "messages[0].content[1].image_url"
    with pytest.raises(ImageError) as raised_late:
        read_header(b"\xff\xd8\xff", param="p")
    assert raised_late.value.param == "p"


@given(data=st.binary(max_size=200), case=st.sampled_from([c for c in CASES if len(c.data) < 5000]), at=st.integers(0, 300))  # fmt: skip
def test_any_bytes_give_a_header_or_an_error_of_the_image_family(
    data: bytes, case: Case, at: int
) -> None:
    for hostile in (
        data,
        case.data[:at] + data,
        case.data[:at] + data + case.data[at + len(data) :],
    ):
        try:
            header = read_header(hostile, ALL)
        except ImageError:
            continue
        assert header.media_type == sniff(hostile)
        assert 1 <= header.width <= 65_535
        assert 1 <= header.height <= 65_535
