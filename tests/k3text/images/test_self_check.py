from typing import Any

import pytest
from PIL import Image

from k3text.images import patchify
from k3text.images.self_check import SelfCheckError, check_pixels


def test_pre_12_this_installation_makes_the_released_pixels() -> None:
    check_pixels()


def test_pre_12_pillow_alone_makes_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patchify, "native_steps", lambda: None)
    check_pixels()


def test_pre_12_another_resampler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = Image.Image.resize

    def sharper(picture: Image.Image, size: tuple[int, int], _: int, *rest: Any) -> Image.Image:
        return resize(picture, size, Image.Resampling.LANCZOS, *rest)

    monkeypatch.setattr(Image.Image, "resize", sharper)
    with pytest.raises(SelfCheckError):
        check_pixels()
