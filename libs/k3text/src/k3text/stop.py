"""Stop strings: found across any chunk border, held back no longer than needed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """What came of one piece of text.

    Attributes:
        text: may be shown now; never has a byte of a matched stop string.
        matched: the stop string that ended the answer, or None.
    """

    text: str
    matched: str | None = None


class StopMatcher:
    """Watches one stream of visible answer text for stop strings.

    The first stop string to be complete wins; of several complete at the same character, the
    longest. Held back is exactly the longest suffix that is a proper prefix of a stop string.
    Not for reasoning and tool arguments: the caller feeds answer text only.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Builds the automaton.

        Args:
            stop_strings: non-empty each; none at all makes a matcher that lets all pass.

        Raises:
            ValueError: a stop string is empty.
        """
        if not all(stop_strings):
            raise ValueError("a stop string is empty")
        self._nodes = _build(stop_strings)
        self._starts = {string[0] for string in stop_strings}
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer, or None while it goes on."""
        return self._matched

    def feed(self, text: str) -> StopStep:
        """Takes the next piece; after a match everything is dropped."""
        if self._matched is not None:
            return StopStep("")
        if not self._held and self._starts.isdisjoint(text):
            return StopStep(text)
        nodes, state = self._nodes, self._state
        whole = self._held + text
        for position, char in enumerate(text, start=len(self._held)):
            state = _advance(nodes, state, char)
            found = nodes[state].found
            if found is not None:
                self._matched = found
                self._held = ""
                return StopStep(whole[: position + 1 - len(found)], found)
        self._state = state
        shown = len(whole) - nodes[state].depth
        self._held = whole[shown:]
        return StopStep(whole[:shown])

    def finish(self) -> str:
        """Ends the stream and gives what was held; the answer ended before the stop string."""
        held, self._held, self._state = self._held, "", 0
        return held


@dataclass(slots=True)
class _Node:
    # A prefix of some stop strings: its length, what follows it, the longest proper suffix of it
    # that is again a prefix, and the longest stop string that ends here.
    depth: int
    children: dict[str, int]
    fallback: int = 0
    found: str | None = None


def _build(stop_strings: Iterable[str]) -> list[_Node]:
    nodes = [_Node(0, {})]
    for string in stop_strings:
        state = 0
        for char in string:
            if char not in nodes[state].children:
                nodes.append(_Node(nodes[state].depth + 1, {}))
                nodes[state].children[char] = len(nodes) - 1
            state = nodes[state].children[char]
        nodes[state].found = string
    queue = list(nodes[0].children.values())
    for state in queue:
        for char, child in nodes[state].children.items():
            fallback = _advance(nodes, nodes[state].fallback, char)
            nodes[child].fallback = fallback
            nodes[child].found = nodes[child].found or nodes[fallback].found
            queue.append(child)
    return nodes


def _advance(nodes: list[_Node], state: int, char: str) -> int:
    while state and char not in nodes[state].children:
        state = nodes[state].fallback
    return nodes[state].children.get(char, 0)
