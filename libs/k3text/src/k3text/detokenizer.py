"""Token ids to text, a few at a time, without ever splitting a character."""

import codecs
from collections.abc import Iterable

from k3text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one stream of ids into text; made for raw completions, where nothing is parsed.

    An incomplete character is held until its last byte comes. Bytes that can never become a
    character turn into U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """Starts an empty stream.

        Args:
            tokenizer: of the model that makes the ids.
            skip_special_tokens: whether specials are left out instead of written by name.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids and gives the text that is certain by now.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        skip = self._skip_special_tokens
        tokenizer = self._tokenizer
        data = b"".join(
            tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if not (skip and tokenizer.is_special(token_id))
        )
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Ends the stream: U+FFFD if its last character was cut, else nothing. Safe twice."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
