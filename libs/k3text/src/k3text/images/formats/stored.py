"""What a format's header says of an image, before any rule of ours."""

from dataclasses import dataclass

MAX_BLOCKS = 65_536
"""Blocks of a container that are walked; a file with more is built to waste time."""

MAX_FRAMES = 10_000
"""Frames that are counted; more read as this many."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An image as it is stored.

    Attributes:
        width: pixels, before the orientation is applied.
        height: pixels, likewise.
        orientation: EXIF's 1 to 8; 1 where there is none or it makes no sense.
        num_frames: frames or pages, counted up to `MAX_FRAMES`.
    """

    width: int
    height: int
    orientation: int = 1
    num_frames: int = 1
