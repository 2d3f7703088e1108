from k3text.chat_format.conversation import (
    AssistantMessage,
    Message,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from k3text.chat_format.tool_results import order_tool_results

CALLS = AssistantMessage(tool_calls=(ToolCall(name="f", id="a"), ToolCall(name="g", id="b")))


def result(tool_call_id: str, content: str = "", name: str = "") -> ToolMessage:
    return ToolMessage(content=content, tool_call_id=tool_call_id, name=name)


def test_results_take_the_order_and_the_names_of_their_calls() -> None:
    messages: list[Message] = [CALLS, result("b", "2", name="stale"), result("a", "1")]
    assert order_tool_results(messages) == [
        CALLS,
        result("a", "1", name="f"),
        result("b", "2", name="g"),
    ]


def test_a_run_with_an_unknown_id_stays_as_it_came() -> None:
    messages: list[Message] = [CALLS, result("b"), result("zzz"), UserMessage(content="x")]
    assert order_tool_results(messages) == messages


def test_ids_minted_from_name_and_position_are_understood_after_exact_ids() -> None:
    messages: list[Message] = [CALLS, result("g:1", "2"), result("f:0", "1")]
    assert order_tool_results(messages)[1:] == [
        result("f:0", "1", name="f"),
        result("g:1", "2", name="g"),
    ]
    tricky = AssistantMessage(tool_calls=(ToolCall(name="f", id="g:1"), ToolCall(name="g", id="b")))
    assert order_tool_results([tricky, result("g:1")])[1:] == [result("g:1", name="f")]


def test_of_calls_with_one_id_the_first_is_meant_and_order_is_stable() -> None:
    calls = AssistantMessage(tool_calls=(ToolCall(name="f", id="a"), ToolCall(name="g", id="a")))
    messages: list[Message] = [calls, result("a", "1"), result("a", "2")]
    assert order_tool_results(messages)[1:] == [
        result("a", "1", name="f"),
        result("a", "2", name="f"),
    ]


def test_runs_are_sorted_by_the_assistant_before_them_only() -> None:
    later = AssistantMessage(tool_calls=(ToolCall(name="h", id="c"),))
    messages: list[Message] = [CALLS, result("a"), later, result("b"), result("c")]
    found = order_tool_results(messages)
    assert found[1] == result("a", name="f")
    assert found[3:] == [result("b"), result("c")]
