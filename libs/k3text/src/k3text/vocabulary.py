"""A small vocabulary of our own, for checkpoints that are ours: 256 bytes and a few merges.

Byte-pair merges are learned from a text by counting, with ties broken by the bytes themselves, so
that the same text and size give the same file on every machine.
"""

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import regex

from k3text.tokenizer import SPLIT_PATTERN, VOCABULARY_FILE, format_ranks

SAMPLE_TEXT = """\
message role user assistant system tool type name think response tools call argument key index
json string number boolean null object array properties required description parameters function
The user asks a question, and the assistant thinks about the question before it answers. Thinking
goes into one channel and the answer into another; when a tool is needed, the call says which tool
and with what arguments, and the result of the call comes back as a message of its own. There is
nothing else to know about the format, but there are many ways to get it wrong.
What is in this picture? There is a cat on the table, next to a window; the light comes from the
left. How many people are there? There are three of them, two standing and one sitting. What does
the sign say? It says that the shop is open from nine to five, every day but Sunday.
Please write a function that returns the sum of the numbers in a list. Here is one:
def total(values):
    result = 0
    for value in values:
        result += value
    return result
It can be shorter: return sum(values). If the list is empty, the result is 0. This is what one
would expect, isn't it? Yes, I'd say so. It doesn't need a special case, and that's a good thing.
{"city": "Paris", "unit": "celsius", "days": 3, "detail": true, "tags": ["weather", "forecast"]}
{"path": "src/main.py", "content": "print('hello world')", "line": 12, "column": 4, "mode": null}
In the morning the river was quiet. Later the wind came up from the south, and the boats went out
one after another until the harbour was empty. An old man sat on the wall and counted them: one,
two, three, seven, ten, twelve. He had done this for years, and he knew every boat by its sail.
When the last one was gone he stood up, took his hat, and walked slowly back into the town.
The weather in Paris is mild today: about 18 degrees, with some clouds in the afternoon and little
wind. Tomorrow will be warmer, between 20 and 23 degrees, and the day after that there may be rain.
"""
"""Written for this purpose: the words of the chat format, plain English, some code and JSON."""


def learn_ranks(num_ranks: int, text: str = SAMPLE_TEXT) -> dict[bytes, int]:
    """Learns a vocabulary.

    Args:
        num_ranks: tokens in all, 256 bytes included, specials not.
        text: what to learn merges from.

    Returns:
        rank by token, the bytes first, in their order.

    Raises:
        ValueError: fewer than 256 tokens asked for, or more than the text has merges.
    """
    if num_ranks < 256:
        raise ValueError("a vocabulary has at least the 256 bytes")
    learner = _Learner(text)
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    while len(tokens) < num_ranks:
        token = learner.merge()
        if token not in known:
            known.add(token)
            tokens.append(token)
    return {token: rank for rank, token in enumerate(tokens)}


def write_vocabulary(directory: Path, num_ranks: int, text: str = SAMPLE_TEXT) -> None:
    """Learns a vocabulary and writes it to `tiktoken.model` in a directory that exists.

    Raises:
        ValueError: as `learn_ranks`.
        OSError: the file cannot be written.
    """
    (directory / VOCABULARY_FILE).write_bytes(format_ranks(learn_ranks(num_ranks, text)))


_Pair = tuple[bytes, bytes]


class _Learner:
    # The distinct words of a text, each as its tokens so far, with counts of neighbours kept up to
    # date merge by merge.

    def __init__(self, text: str) -> None:
        words = Counter(regex.findall(f"(?V1){SPLIT_PATTERN}", text))
        self._words = [[bytes([byte]) for byte in word.encode()] for word in words]
        self._weights = list(words.values())
        self._counts: Counter[_Pair] = Counter()
        self._places: defaultdict[_Pair, set[int]] = defaultdict(set)
        for index in range(len(self._words)):
            self._count(index, 1)

    def merge(self) -> bytes:
        """Joins the most frequent neighbours everywhere and gives the new token.

        Raises:
            ValueError: every word is one token already.
        """
        live = {pair: count for pair, count in self._counts.items() if count > 0}
        if not live:
            raise ValueError("the text has no more merges; learn from a longer one")
        best = min(live, key=lambda pair: (-live[pair], pair))
        for index in sorted(self._places.pop(best)):
            self._count(index, -1)
            self._words[index] = _join(self._words[index], best)
            self._count(index, 1)
        del self._counts[best]
        return best[0] + best[1]

    def _count(self, index: int, sign: int) -> None:
        word = self._words[index]
        for pair in pairwise(word):
            self._counts[pair] += sign * self._weights[index]
            if sign > 0:
                self._places[pair].add(index)


def _join(word: list[bytes], pair: _Pair) -> list[bytes]:
    joined: list[bytes] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            joined.append(pair[0] + pair[1])
            position += 2
        else:
            joined.append(word[position])
            position += 1
    return joined
