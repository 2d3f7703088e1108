"""The model's output, token by token, turned into reasoning, content and tool calls.

Enters: token ids, in deltas of any size, and the channel in which the prompt left the model.
Leaves: events. What always holds: markers are known by id, so no text can be taken for one and
none ever shows; events come in the order reasoning, content, calls; and the joined pieces do not
depend on how the ids were cut. A parser is replayed by feeding the ids again to a new one.

Where the parser is, and what moves it:

    THINK --close think--> BETWEEN --open response--> RESPONSE --close response--> BETWEEN
      '------------- open response, open tools, open call (think was not closed) ------------.
    BETWEEN, RESPONSE, THINK --open tools--> TOOLS --open call--> CALL --open argument--> ARGUMENT
    ARGUMENT --close argument--> CALL --close call--> TOOLS --close tools--> BETWEEN
    anything --close message, end of message--> DONE

A tag that closes an outer element closes the inner ones; a tag without meaning where it stands is
dropped.
"""

import codecs
from collections.abc import Iterable
from enum import Enum
from typing import Literal

from k3text.parsers.arguments import ArgumentsWriter
from k3text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from k3text.parsers.tags import (
    MAX_SHORT_HEADER_BYTES,
    Tag,
    may_be_long,
    may_become_tag,
    parse_tag,
)
from k3text.tokenizer import Tokenizer


class _Place(Enum):
    THINK = "in the think channel"
    RESPONSE = "in the response channel"
    BETWEEN = "in the message, in no channel"
    TOOLS = "among calls"
    CALL = "in a call, in no block"
    ARGUMENT = "in an argument block"
    RAW = "in a raw block"
    DONE = "behind the message"


_IN_CALL = (_Place.CALL, _Place.ARGUMENT, _Place.RAW)
_IN_BLOCK = (_Place.ARGUMENT, _Place.RAW)


class OutputParser:
    """Parses one answer.

    Attributes:
        num_dropped_tokens: ordinary tokens that belong to nothing a client may see: between
            calls, reasoning after content, content after calls.
        num_malformed: argument values that were not what their type says.
        num_duplicate_keys: argument keys that were written twice in one call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        start_channel: Literal["think", "response"],
        *,
        ignore_end: bool = False,
    ) -> None:
        """Starts where the prompt ends.

        Args:
            tokenizer: of the model.
            start_channel: the channel that the prompt left open.
            ignore_end: whether end tokens are dropped instead of ending the answer, for
                benchmarks that generate past them.
        """
        self._tokenizer = tokenizer
        self._ids = tokenizer.specials
        self._ignore_end = ignore_end
        self._place = _Place.THINK if start_channel == "think" else _Place.RESPONSE
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0
        self._run: list[bytes] = []
        self._run_positions: list[int] = []
        self._header: bytearray | None = None
        self._header_positions: list[int] = []
        self._header_opens = False
        self._header_is_long = False
        self._has_content = False
        self._num_calls = 0
        self._call: ArgumentsWriter | None = None
        self._events: list[Event] = []
        self._arguments: list[str] = []
        self.num_dropped_tokens = 0
        self.num_malformed = 0
        self.num_duplicate_keys = 0

    @property
    def is_done(self) -> bool:
        """Whether the message has ended; later tokens are ignored."""
        return self._place is _Place.DONE

    @property
    def num_tool_calls(self) -> int:
        """Calls begun so far."""
        return self._num_calls

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        """Takes the next output tokens.

        Returns:
            what they say; a run of tokens of one kind makes one event.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        tokenizer = self._tokenizer
        for token_id in token_ids:
            if self._place is not _Place.DONE:
                if tokenizer.is_special(token_id):
                    self._take_special(token_id)
                else:
                    self._take_bytes(tokenizer.token_bytes(token_id), self._position)
            self._position += 1
        self._flush()
        return self._take_events()

    def finish(self, *, is_cut: bool) -> list[Event]:
        """Ends the answer; safe twice.

        A marker without its separator is dropped, real text behind a stray one is kept, and a
        cut character becomes one U+FFFD.

        Args:
            is_cut: whether the model was stopped (length, stop string, cancel) instead of
                stopping; a call that is open then is incomplete.
        """
        if self._place is not _Place.DONE:
            self._drop_header()
            self._leave(is_whole=not is_cut and self._place not in _IN_BLOCK)
            self._place = _Place.DONE
        return self._take_events()

    def _take_events(self) -> list[Event]:
        self._join_arguments()
        events, self._events = self._events, []
        return events

    def _take_bytes(self, data: bytes, position: int) -> None:
        if self._header is not None:
            self._header += data
            self._header_positions.append(position)
            if not self._header_is_long and len(self._header) > MAX_SHORT_HEADER_BYTES:
                self._header_is_long = may_be_long(self._header)
                if not self._header_is_long:
                    self._release_header()
            return
        if self._place is _Place.BETWEEN and not self._num_calls:
            # An answer outside any channel is still an answer; blank space there is layout.
            data = data.lstrip()
            if data:
                self._place = _Place.RESPONSE
        self._run.append(data)
        self._run_positions.append(position)

    def _take_special(self, token_id: int) -> None:
        ids = self._ids
        if token_id in (ids.open, ids.close):
            self._drop_header()
            self._header = bytearray()
            self._header_opens = token_id == ids.open
            self._header_is_long = False
        elif token_id == ids.sep:
            self._finish_header()
        elif token_id in (ids.end_of_msg, ids.eos):
            self._drop_header()
            if not self._ignore_end:
                self._leave(is_whole=self._place not in _IN_BLOCK)
                self._place = _Place.DONE

    def _finish_header(self) -> None:
        header = self._header
        if header is None:
            return
        tag = parse_tag(header)
        if tag is None:
            self._drop_header()
            return
        self._header = None
        self._header_positions = []
        if self._header_opens:
            self._open(tag)
        else:
            self._close(tag.name)

    def _drop_header(self) -> None:
        # Forgets a marker that got no separator. What followed it was the beginning of a tag, or
        # else text behind a stray marker, which is kept.
        if self._header is None:
            return
        if not may_become_tag(self._header):
            self._release_header()
            return
        self._header = None
        self._header_positions = []

    def _release_header(self) -> None:
        header, self._header = self._header, None
        positions, self._header_positions = self._header_positions, []
        # The first token carries the text, the others their positions.
        for at, position in enumerate(positions):
            self._take_bytes(bytes(header or b"") if at == 0 else b"", position)

    def _open(self, tag: Tag) -> None:
        match tag.name:
            case "think" if self._place is not _Place.THINK:
                self._leave()
                self._place = _Place.THINK
            case "response" if self._place is not _Place.RESPONSE:
                self._leave()
                self._place = _Place.RESPONSE
            case "tools" if self._place is not _Place.TOOLS:
                self._leave()
                self._place = _Place.TOOLS
            case "call":
                self._leave()
                self._begin_call(tag.attributes.get("tool", ""))
            case "argument" if self._place in _IN_CALL:
                self._end_block()
                self._begin_argument(tag)
            case "json" if self._place in _IN_CALL:
                self._end_block()
                if self._call is not None:
                    self._write(self._call.begin_raw())
                self._place = _Place.RAW
            case _:
                pass

    def _close(self, name: str) -> None:
        match name:
            case "think" if self._place is _Place.THINK:
                self._leave()
                self._place = _Place.BETWEEN
            case "response" if self._place is _Place.RESPONSE:
                self._leave()
                self._place = _Place.BETWEEN
            case "tools" if self._place is _Place.TOOLS or self._place in _IN_CALL:
                self._leave()
                self._place = _Place.BETWEEN
            case "call" if self._place in _IN_CALL:
                self._leave()
                self._place = _Place.TOOLS
            case "argument" | "json" if self._place in _IN_BLOCK:
                self._end_block()
            case "message":
                self._leave()
                self._place = _Place.BETWEEN if self._ignore_end else _Place.DONE
            case _:
                pass

    def _leave(self, *, is_whole: bool = True) -> None:
        # Ends whatever is open, so that the caller may set a new place.
        self._flush()
        if self._place in _IN_CALL:
            self._end_call(is_whole=is_whole)
        else:
            self._show(self._decoder.decode(b"", final=True), ())
            self._decoder.reset()

    def _flush(self) -> None:
        if not self._run_positions:
            return
        data, positions = b"".join(self._run), tuple(self._run_positions)
        self._run.clear()
        self._run_positions.clear()
        if self._place in (_Place.THINK, _Place.RESPONSE):
            self._show(self._decoder.decode(data), positions)
        elif self._place in _IN_BLOCK and self._call is not None:
            self._write(self._call.feed(data))
        else:
            self.num_dropped_tokens += len(positions)

    def _show(self, text: str, positions: tuple[int, ...]) -> None:
        if not text and not positions:
            return
        if self._place is _Place.THINK and not self._has_content and not self._num_calls:
            self._emit(ReasoningDelta(text=text, positions=positions))
        elif self._place is _Place.RESPONSE and not self._num_calls:
            self._has_content = True
            self._emit(ContentDelta(text=text, positions=positions))
        else:
            self.num_dropped_tokens += len(positions)

    def _begin_call(self, name: str) -> None:
        self._place = _Place.CALL
        if not name:
            # Nobody can run a call without a name: it is walked through and not shown.
            self.num_malformed += 1
            return
        self._call = ArgumentsWriter()
        self._emit(ToolCallStart(index=self._num_calls, name=name))
        self._num_calls += 1

    def _begin_argument(self, tag: Tag) -> None:
        self._place = _Place.ARGUMENT
        if self._call is not None:
            attributes = tag.attributes
            self._write(
                self._call.begin_argument(attributes.get("key", ""), attributes.get("type", ""))
            )

    def _end_block(self) -> None:
        self._flush()
        if self._place in _IN_BLOCK and self._call is not None:
            self._write(self._call.end_block())
        self._place = _Place.CALL

    def _end_call(self, *, is_whole: bool) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        if is_whole:
            self._write(call.end_block() + call.end_call())
        self._emit(ToolCallEnd(index=self._num_calls - 1, is_complete=is_whole))
        self.num_malformed += call.num_malformed
        self.num_duplicate_keys += call.num_duplicate_keys

    def _write(self, text: str) -> None:
        if text:
            self._arguments.append(text)

    def _join_arguments(self) -> None:
        if self._arguments:
            text = "".join(self._arguments)
            self._arguments.clear()
            self._events.append(ToolCallArgumentsDelta(index=self._num_calls - 1, text=text))

    def _emit(self, event: Event) -> None:
        self._join_arguments()
        self._events.append(event)
