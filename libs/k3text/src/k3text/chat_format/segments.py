"""Pieces of a rendered prompt, and the writer that makes tags of them.

A tag is cut as the release cuts it, because each piece is encoded on its own and another cut would
give other ids:

    <|open|>* . message . " role" . '="' . user . '"' . <|sep|>*        (* special)

Source: `encoding_k3.py` of the release, as fixed by its published fixtures.
"""

from collections.abc import Sequence

import msgspec

from k3text.chat_format.conversation import Content, ImagePart, ImageSize, TextPart
from k3text.special_tokens import (
    CLOSE,
    END_OF_MSG,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    SEP,
)
from k3wire.errors import InvalidRequest


class Segment(msgspec.Struct, frozen=True, kw_only=True, tag="segment"):
    """A piece that is encoded on its own.

    Attributes:
        text: not empty.
        is_special: the text is the name of a special token and becomes it; otherwise every
            character is ordinary, whatever it looks like.
        num_repeats: how often the piece stands there; above 1 for image pads only.
        image_index: of the image whose pads these are, else None.
    """

    text: str
    is_special: bool = False
    num_repeats: int = 1
    image_index: int | None = None


class SegmentWriter:
    """Collects segments; knows tags and content, not what they mean."""

    def __init__(self, images: Sequence[ImageSize]) -> None:
        """Starts empty.

        Args:
            images: what image parts refer to.
        """
        self._images = images
        self._used: set[int] = set()
        self.segments: list[Segment] = []

    def text(self, text: str) -> None:
        """Adds ordinary text; nothing if it is empty."""
        if text:
            self.segments.append(Segment(text=text))

    def open_tag(self, name: str, attributes: Sequence[tuple[str, str]] = ()) -> None:
        """Opens a tag; values are escaped, the body that follows is not."""
        self._special(OPEN)
        self.text(name)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(escape_attribute(value))
            self.text('"')
        self._special(SEP)

    def close_tag(self, name: str) -> None:
        """Closes a tag."""
        self._special(CLOSE)
        self.text(name)
        self._special(SEP)

    def close_message(self) -> None:
        """Closes a message and ends the turn."""
        self.close_tag("message")
        self._special(END_OF_MSG)

    def content(self, content: Content) -> None:
        """Adds content, part by part.

        Raises:
            InvalidRequest: a part refers to an image that is not there, or that stands elsewhere.
        """
        if isinstance(content, str):
            self.text(content)
            return
        for part in content:
            match part:
                case TextPart(text=text):
                    self.text(text)
                case ImagePart(index=index):
                    self._image(index)

    def check_all_images_placed(self) -> None:
        """Checks that no image was left out.

        Raises:
            InvalidRequest: an image has no place in the conversation.
        """
        if len(self._used) != len(self._images):
            raise InvalidRequest("An image has no place in the conversation; refer to it by a part")

    def _special(self, name: str) -> None:
        self.segments.append(Segment(text=name, is_special=True))

    def _image(self, index: int) -> None:
        if not 0 <= index < len(self._images) or index in self._used:
            raise InvalidRequest(f"Image part {index} does not match the images given")
        self._used.add(index)
        size = self._images[index]
        self._special(MEDIA_BEGIN)
        self.text(f"image {size.width}x{size.height}")
        self._special(MEDIA_CONTENT)
        self.segments.append(
            Segment(text=MEDIA_PAD, is_special=True, num_repeats=size.num_tokens, image_index=index)
        )
        self._special(MEDIA_END)


def escape_attribute(value: str) -> str:
    """Escapes an attribute's value: `&` first, then the double quote, and nothing else."""
    return value.replace("&", "&amp;").replace('"', "&quot;")
