"""Tool results put into the order of the calls they answer, and named after them."""

from collections.abc import Sequence

import msgspec

from k3text.chat_format.conversation import AssistantMessage, Message, ToolCall, ToolMessage


def order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Sorts each run of tool results by the calls of the assistant message before it.

    A result belongs to the call whose id it carries, or to the one it means by `name:position`
    (position from 0), an id that other servers mint. If every result of a run belongs to a call,
    the run is sorted, stable, and each takes the name of its call; otherwise the run stays.

    Source: `normalize_xtml_tool_result_messages` of the release; the alias from vLLM's renderer.
    """
    ordered: list[Message] = []
    run: list[ToolMessage] = []
    calls: Sequence[ToolCall] = ()
    for message in messages:
        match message:
            case ToolMessage():
                run.append(message)
                continue
            case AssistantMessage(tool_calls=tool_calls):
                ordered.extend(_order_run(run, calls))
                calls = tool_calls
            case _:
                ordered.extend(_order_run(run, calls))
        run = []
        ordered.append(message)
    ordered.extend(_order_run(run, calls))
    return ordered


def _order_run(run: Sequence[ToolMessage], calls: Sequence[ToolCall]) -> Sequence[ToolMessage]:
    if not run:
        return run
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id:
            positions.setdefault(call.id, position)
    for position, call in enumerate(calls):
        positions.setdefault(f"{call.name}:{position}", position)
    found = [positions.get(message.tool_call_id) for message in run]
    pairs = [(at, message) for at, message in zip(found, run, strict=True) if at is not None]
    if len(pairs) < len(run):
        return run
    pairs.sort(key=lambda pair: pair[0])
    return [msgspec.structs.replace(message, name=calls[at].name) for at, message in pairs]
