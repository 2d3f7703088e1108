"""Text for a terminal that somebody else wrote."""

from unicodedata import category


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters become pictures of them."""
    return "".join(
        char if char in "\n\t" or category(char) != "Cc" else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
