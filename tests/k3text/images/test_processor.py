"""The whole way in one process, against a plain computation that shares no code with it."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from PIL import Image
from support.hostile_images import Case, all_cases, cases_of
from support.pictures import encode, gradient, over_chessboard, reassemble

from k3text.images import decode
from k3text.images.config import Background, ProcessorConfig
from k3text.images.header import (
    DEFAULT_MEDIA_TYPES,
    OPTIONAL_MEDIA_TYPES,
    ImageLimits,
    read_header,
)
from k3text.images.keys import content_key, feature_key
from k3text.images.processor import cut, process
from k3wire.errors import ImageError

ALL = ImageLimits(media_types=DEFAULT_MEDIA_TYPES | OPTIONAL_MEDIA_TYPES)
K3 = ProcessorConfig()


def check(case: Case, pixels: np.ndarray, grid_thw: tuple[int, int, int], width: int, height: int) -> None:  # fmt: skip
    """Holds byte patches to what a case expects."""
    if case.picture is None:
        assert (width, height) == case.size
        return
    assert (height, width) == case.picture.shape[:2]
    padded = reassemble(pixels, grid_thw).astype(int)
    seen = padded[:height, :width]
    assert np.abs(seen - case.picture).mean() <= case.tolerance
    assert not padded[height:].any()
    assert not padded[:, width:].any()


def hostile(item: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases_of(item), ids=lambda case: case.name)


def give(case: Case) -> None:
    """Holds a whole file to what a case expects: the right picture or the right error."""
    if case.code:
        with pytest.raises(ImageError) as raised:
            cut(case.data, K3, ALL)
        assert raised.value.code == case.code
    else:
        found = cut(case.data, K3, ALL)
        check(case, found.pixels, found.grid_thw, found.width, found.height)


@hostile("PRE-02")
def test_pre_01_pre_02_a_bomb_is_refused(case: Case) -> None:
    assert case.code
    give(case)


@hostile("PRE-03")
def test_pre_03_a_picture_is_turned_as_its_exif_says(case: Case) -> None:
    give(case)


@hostile("PRE-04")
def test_pre_04_the_first_frame_on_its_canvas_is_the_picture(case: Case) -> None:
    give(case)


def test_pre_05_wide_numbers_are_scaled_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "STRIP_PIXELS", 7000)
    grey = np.arange(1000 * 700, dtype=np.uint32).reshape(700, 1000) * 91 % 65_536
    data = encode(grey.astype(np.uint16), "PNG", compress_level=1)
    header = read_header(data)
    tracemalloc.start()
    found = decode.decode(data, header)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (np.asarray(found) == np.rint(grey / 257).astype(np.uint8)[:, :, None]).all()
    # All of it at once, in 64 bits, would be 5.6 MB and a few times that.
    assert most_bytes < 2_000_000 + len(data)


@hostile("PRE-05")
def test_pre_05_every_mode_and_depth_gives_its_picture(case: Case) -> None:
    give(case)


@hostile("PRE-07")
def test_pre_07_colour_profiles_change_nothing(case: Case) -> None:
    give(case)


@hostile("PRE-08")
def test_pre_08_a_damaged_file_is_an_error_and_never_half_a_picture(case: Case) -> None:
    assert case.code
    give(case)


@hostile("PRE-09")
def test_pre_04_pre_05_pre_09_the_formats_of_the_switch_give_their_pictures(case: Case) -> None:
    give(case)


@hostile("PRE-10")
def test_pre_10_what_is_no_picture_is_refused(case: Case) -> None:
    assert case.code
    give(case)


@hostile("PRE-11")
def test_pre_11_extreme_shapes_keep_their_size_in_the_prompt(case: Case) -> None:
    give(case)


def plain(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """Float64 patches of an opaque picture resized to a size: [N, 3, 14, 14]."""
    pixels = np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC), np.float64)
    tall, wide = -(-height // 28) * 28, -(-width // 28) * 28
    padded = np.zeros((tall, wide, 3))
    padded[:height, :width] = pixels
    normal = (padded / 255 - 0.5) / 0.5
    return np.stack(
        [
            normal[top : top + 14, left : left + 14].transpose(2, 0, 1)
            for top in range(0, tall, 14)
            for left in range(0, wide, 14)
        ]
    )


@pytest.mark.parametrize(
    ("width", "height", "new_width", "new_height"),
    [(1, 1, 1, 1), (50, 31, 50, 31), (640, 480, 448, 336), (3000, 40, 3000, 40), (20, 9000, 15, 7168)],
)  # fmt: skip
def test_pre_13_patches_equal_a_plain_float64_computation(
    width: int, height: int, new_width: int, new_height: int
) -> None:
    # 768 patches: 640 x 480 has 45 x 34 of them, so it shrinks by sqrt(768 / 1530).
    config = dataclasses.replace(K3, max_patches=768 if width == 640 else 65_536)
    if width == 640:
        new_width, new_height = (int(side * (768 / 1530) ** 0.5) for side in (640, 480))
    picture = Image.fromarray(gradient(width, height))
    found = process(encode(picture, "PNG"), config)
    expected = plain(picture, new_width, new_height)
    assert found.patches.dtype == np.float32
    assert found.patches.shape == expected.shape
    np.testing.assert_allclose(found.patches, expected, rtol=0, atol=1.2e-7)


def test_pre_13_a_processed_image_carries_its_size_tokens_and_keys() -> None:
    data = encode(gradient(57, 30), "PNG")
    found = process(data, K3)
    assert (found.width, found.height, found.grid_thw, found.num_tokens) == (57, 30, (1, 4, 6), 6)
    assert found.content_key == content_key(data)
    assert found.feature_key == feature_key(found.content_key, K3)


def test_pre_06_alpha_survives_the_resize_and_meets_the_background_after_it() -> None:
    config = dataclasses.replace(K3, max_patches=16)
    alpha = np.zeros((200, 200), np.uint8)
    alpha[50:150, 60:140] = 255
    rgba = np.dstack([gradient(200, 200), alpha])
    found = cut(encode(rgba, "PNG"), config)
    side = int(200 * (16 / 14**2) ** 0.5)
    small = np.asarray(Image.fromarray(rgba).resize((side, side), Image.Resampling.BICUBIC))
    seen = reassemble(found.pixels, found.grid_thw)[:side, :side]
    np.testing.assert_array_equal(seen, over_chessboard(small))


def test_pre_06_a_background_before_the_resize_is_resized_with_the_picture() -> None:
    config = dataclasses.replace(K3, max_patches=16, fill_stage="before_resize")
    rgba = np.dstack([gradient(200, 200), np.zeros((200, 200), np.uint8)])
    found = cut(encode(rgba, "PNG"), config)
    side = int(200 * (16 / 14**2) ** 0.5)
    filled = Image.fromarray(over_chessboard(rgba))
    expected = np.asarray(filled.resize((side, side), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(reassemble(found.pixels, found.grid_thw)[:side, :side], expected)


@pytest.mark.parametrize(("pattern", "value"), [("white", 255), ("black", 0), ("gray", 128)])
def test_pre_06_flat_backgrounds_show_through(pattern: str, value: int) -> None:
    config = dataclasses.replace(K3, background=Background(pattern=pattern))  # pyright: ignore[reportArgumentType]
    rgba = np.dstack([gradient(28, 28), np.zeros((28, 28), np.uint8)])
    assert (cut(encode(rgba, "PNG"), config).pixels == value).all()


def test_pre_06_without_a_background_the_hidden_colours_show() -> None:
    config = dataclasses.replace(K3, background=None)
    colours = gradient(28, 28)
    rgba = np.dstack([colours, np.zeros((28, 28), np.uint8)])
    found = cut(encode(rgba, "PNG"), config)
    np.testing.assert_array_equal(reassemble(found.pixels, found.grid_thw), colours)


def test_pre_06_an_opaque_alpha_channel_changes_nothing_even_through_a_resize() -> None:
    config = dataclasses.replace(K3, max_patches=64)
    colours = gradient(300, 200)
    rgba = np.dstack([colours, np.full((200, 300), 255, np.uint8)])
    one, other = (cut(encode(picture, "PNG"), config) for picture in (colours, rgba))
    np.testing.assert_array_equal(one.pixels, other.pixels)


def test_pre_06_a_large_transparent_image_is_blended_in_bands_without_seams() -> None:
    height, width = 1100, 1200
    rgba = np.zeros((height, width, 4), np.uint8)
    found = cut(encode(rgba, "PNG"), K3)
    seen = reassemble(found.pixels, found.grid_thw)[:height, :width, 0]
    y, x = np.mgrid[0:height, 0:width] // 8
    np.testing.assert_array_equal(seen, np.where((y + x) % 2 == 0, 255, 180))


def test_mean_and_std_are_per_channel() -> None:
    config = dataclasses.replace(K3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    colour = np.full((14, 14, 3), (10, 20, 30), np.uint8)
    found = process(encode(colour, "PNG"), config)
    expected = [(10 / 255 - 0.1) / 0.5, (20 / 255 - 0.2) / 0.25, (30 / 255 - 0.3) / 0.2]
    np.testing.assert_allclose(found.patches[0, :, 0, 0], expected, atol=3e-7)


def test_pre_08_no_error_shows_the_words_of_the_library_below() -> None:
    for case in all_cases():
        if case.code:
            with pytest.raises(ImageError) as raised:
                cut(case.data, K3, ALL)
            text = raised.value.message.lower()
            assert not any(word in text for word in ("pil", "0x", "bytesio", "libjpeg", "errno"))
