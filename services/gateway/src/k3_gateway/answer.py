"""From token deltas to what a client may see, and to the reason why the answer ended.

Enters: `TokenDelta`s of one request, in order. Leaves: parser events with stop strings applied to
visible text, and without the calls that the client does not want. Always true: matched stop text
never leaves, nothing follows the end, and neither the pieces joined nor the counts depend on how
tokens were cut into deltas. Streamed and whole answers both go through here, so they cannot
differ.
"""

from collections.abc import Sequence
from typing import Literal

from k3text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from k3text.parsers.output_parser import OutputParser
from k3text.stop import StopMatcher
from k3wire.messages.base import StageReport
from k3wire.messages.stream import TokenDelta

PublicFinish = Literal["stop", "length", "tool_calls"]
"""The only finish reasons a client sees."""


class Answer:
    """One answer in the making.

    Attributes:
        num_output_tokens: delivered so far, end token included.
        num_reasoning_tokens: of them, those that reasoning text is made of.
        num_cached_tokens: the first value a worker reported; later ones do not change it.
        reports: of all stages so far.
    """

    def __init__(
        self, parser: OutputParser, stops: Sequence[str], *, max_calls: int | None = None
    ) -> None:
        """Starts where the prompt ends.

        Args:
            parser: with the start channel of the prompt.
            stops: stop strings, for visible answer text only.
            max_calls: calls that the client wants at most, even if the model writes more.
        """
        self._parser = parser
        self._matcher = StopMatcher(stops)
        self._max_calls = max_calls
        self._finish: str | None = None
        self._num_whole_calls = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens: int | None = None
        self.reports: list[StageReport] = []

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come; true early when a stop string matched."""
        return self._finish is not None

    @property
    def has_stopped_early(self) -> bool:
        """Whether a stop string ended the answer while workers still generate."""
        return self._matcher.matched is not None

    @property
    def finish(self) -> PublicFinish:
        """OpenAI's finish reason, once the answer is ended."""
        if self._finish != "stop":
            return "length"
        return "tool_calls" if self._num_whole_calls and not self.has_stopped_early else "stop"

    def feed(self, delta: TokenDelta) -> list[Event]:
        """Takes a delta; gives what the client may see of it."""
        if self.is_ended:
            return []
        self.reports.extend(delta.reports)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        self.num_output_tokens += len(delta.token_ids)
        events = self._show(self._parser.feed(delta.token_ids))
        if delta.finish_reason is not None and not self.is_ended:
            events += self._end(delta.finish_reason)
        return events

    def _show(self, raw: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in raw:
            match event:
                case ReasoningDelta(positions=positions):
                    self.num_reasoning_tokens += len(positions)
                    events.append(event)
                case ContentDelta(text=text, positions=positions):
                    step = self._matcher.feed(text)
                    if step.text:
                        events.append(ContentDelta(text=step.text, positions=positions))
                    if step.matched is not None:
                        self._finish = "stop"
                        return events
                case (
                    ToolCallStart(index=index)
                    | ToolCallArgumentsDelta(index=index)
                    | ToolCallEnd(index=index)
                ):
                    events += self._flush_held()
                    if self._max_calls is None or index < self._max_calls:
                        self._num_whole_calls += _is_whole_call(event)
                        events.append(event)
        return events

    def _flush_held(self) -> list[Event]:
        # Content never comes back after a call, so held text can no longer become a stop string.
        held = self._matcher.finish()
        return [ContentDelta(text=held)] if held else []

    def _end(self, reason: str) -> list[Event]:
        events = self._show(self._parser.finish(is_cut=reason != "stop"))
        if not self.is_ended:
            events += self._flush_held()
            self._finish = reason
        return events


def _is_whole_call(event: Event) -> bool:
    match event:
        case ToolCallEnd(is_complete=is_complete):
            return is_complete
        case _:
            return False
