"""Events put together to one message: the answer that is not streamed."""

from collections.abc import Iterable

from k3text.parsers.events import (
    ContentDelta,
    Event,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


def assemble(events: Iterable[Event]) -> ParsedMessage:
    """Joins the events of one answer, so that whole and streamed answers cannot differ."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    is_complete: list[bool] = []
    for event in events:
        match event:
            case ReasoningDelta(text=text):
                reasoning.append(text)
            case ContentDelta(text=text):
                content.append(text)
            case ToolCallStart(name=name):
                names.append(name)
                arguments.append([])
                is_complete.append(False)
            case ToolCallArgumentsDelta(index=index, text=text):
                arguments[index].append(text)
            case ToolCallEnd(index=index, is_complete=whole):
                is_complete[index] = whole
    return ParsedMessage(
        reasoning="".join(reasoning),
        content="".join(content),
        tool_calls=tuple(
            ParsedCall(name=name, arguments="".join(pieces), is_complete=whole)
            for name, pieces, whole in zip(names, arguments, is_complete, strict=True)
        ),
    )
