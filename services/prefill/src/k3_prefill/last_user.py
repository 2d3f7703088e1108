"""The last thing a user said, read back from a rendered prompt; what a script is matched with."""

from array import array
from collections.abc import Sequence

from k3text.tokenizer import Tokenizer

_USER_HEAD = 'message role="user"'


def last_user_text(tokenizer: Tokenizer, token_ids: "array[int]") -> str:
    """Gives the text of the last user message; pictures in it appear as their markers' names.

    Markers are told from text by id, so that a user who types one is not taken for one.

    Returns:
        "" where the prompt has no user message.
    """
    specials = tokenizer.specials
    end = len(token_ids)
    for start in range(len(token_ids) - 1, -1, -1):
        if token_ids[start] != specials.open:
            continue
        head_end = _find(token_ids, specials.sep, start, end)
        head = tokenizer.decode_bytes(token_ids[start + 1 : head_end]).decode(errors="replace")
        if head.startswith(_USER_HEAD):
            body_end = _find(token_ids, specials.close, head_end, end)
            body = token_ids[head_end + 1 : body_end]
            return tokenizer.decode_bytes(body).decode(errors="replace")
    return ""


def _find(token_ids: Sequence[int], wanted: int, start: int, end: int) -> int:
    for index in range(start, end):
        if token_ids[index] == wanted:
            return index
    return end
