"""How images become patches for one checkpoint, read from its `preprocessor_config.json`.

Source: K3 architecture sheet, section 1.3 (`media_proc_cfg`) and section 2.7.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from k3text.images.versions import processor_version

FILE_NAME = "preprocessor_config.json"

Pattern = Literal["chessboard", "white", "black", "gray"]
FillStage = Literal["before_resize", "after_resize"]
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Background:
    """What lies behind transparent pixels.

    Attributes:
        pattern: a chessboard or one flat grey.
        square_size: side of a chessboard's squares, pixels.
        is_white_top_left: whether the first square is the bright one.
        white_value: grey of the bright squares.
        gray_value: grey of the dark squares.
    """

    pattern: Pattern = "chessboard"
    square_size: int = 8
    is_white_top_left: bool = True
    white_value: int = 255
    gray_value: int = 180


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """Everything that decides which patches an image gives; defaults are the released K3's.

    Attributes:
        patch_size: side of a patch, pixels.
        merge_size: patches a side that the tower merges into one token.
        max_patches: patches of an image before padding, at most about so many.
        max_patches_a_side: patches along one side, at most.
        mean: subtracted from each channel, on the scale 0 to 1.
        std: divides each channel afterwards.
        background: behind transparent pixels; None drops alpha and shows the hidden colours.
        fill_stage: whether the background comes before or after the resize.
        version: of the code and codecs that make the pixels.
    """

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 65_536
    max_patches_a_side: int = 512
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    background: Background | None = Background()
    fill_stage: FillStage = "after_resize"
    version: str = field(default_factory=processor_version)


class ProcessorConfigError(ValueError):
    """A checkpoint's preprocessor configuration cannot be used; stops a start."""


class _BackgroundJson(msgspec.Struct, frozen=True, kw_only=True):
    # What the released code assumes where its file is silent.
    pattern: Pattern = "black"
    chessboard_square_size: Positive = 16
    chessboard_square_on_top_left: bool = True
    chessboard_white_value: Byte = 255
    chessboard_gray_value: Byte = 200


class _MediaJson(msgspec.Struct, frozen=True, kw_only=True):
    patch_size: Positive = 14
    # Checked below: msgspec 0.23 corrupts memory on a union of bounded integer and fixed tuple.
    merge_kernel_size: int | tuple[int, int] = 2
    in_patch_limit: Positive = 65_536
    patch_limit_on_one_side: Positive = 512
    fixed_output_tokens: int | None = None
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    transparent_bg_config: _BackgroundJson | msgspec.UnsetType | None = msgspec.UNSET
    transparent_bg_fill_stage: FillStage | msgspec.UnsetType = msgspec.UNSET


class _FileJson(msgspec.Struct, frozen=True, kw_only=True):
    media_proc_cfg: _MediaJson = _MediaJson()


def read_processor_config(checkpoint: Path) -> ProcessorConfig:
    """Reads a checkpoint directory's image rules; the released K3's where it has no such file.

    A file without `transparent_bg_config` gets K3's chessboard; one that sets it to null drops
    alpha, as the released code does.

    Raises:
        ProcessorConfigError: the file is no JSON or holds values that cannot be used.
    """
    path = checkpoint / FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ProcessorConfig()
    try:
        media = msgspec.json.decode(data, type=_FileJson).media_proc_cfg
    except msgspec.DecodeError as error:
        raise ProcessorConfigError(f"{FILE_NAME} cannot be used: {error}") from error
    return _from_json(media)


def _from_json(media: _MediaJson) -> ProcessorConfig:
    if media.fixed_output_tokens is not None:
        raise ProcessorConfigError(f"{FILE_NAME}: fixed_output_tokens is not supported")
    if 0.0 in media.image_std:
        raise ProcessorConfigError(f"{FILE_NAME}: image_std must not be zero")
    merge = media.merge_kernel_size
    sides = {merge} if isinstance(merge, int) else set(merge)
    if len(sides) != 1 or min(sides) < 1:
        raise ProcessorConfigError(f"{FILE_NAME}: merge_kernel_size must be square")
    background, stage = _background(media)
    return ProcessorConfig(
        patch_size=media.patch_size,
        merge_size=sides.pop(),
        max_patches=media.in_patch_limit,
        max_patches_a_side=media.patch_limit_on_one_side,
        mean=media.image_mean,
        std=media.image_std,
        background=background,
        fill_stage=stage,
    )


def _background(media: _MediaJson) -> tuple[Background | None, FillStage]:
    found, stage = media.transparent_bg_config, media.transparent_bg_fill_stage
    if found is msgspec.UNSET:
        return Background(), "after_resize" if stage is msgspec.UNSET else stage
    background = found and Background(
        pattern=found.pattern,
        square_size=found.chessboard_square_size,
        is_white_top_left=found.chessboard_square_on_top_left,
        white_value=found.chessboard_white_value,
        gray_value=found.chessboard_gray_value,
    )
    # A file that names a background and no stage means the released code's own default.
    return background, "before_resize" if stage is msgspec.UNSET else stage
