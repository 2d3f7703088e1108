"""Ids of spans: read from callers, written for callees, and who decides what is recorded."""

import pytest
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from k3wire.telemetry.spans import OurSpan, child_context, read_parent, write_parent

TRACE, SPAN = "a" * 32, "b" * 16


def test_a_callers_span_is_read_as_it_was_written() -> None:
    parent = read_parent({"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert write_parent(parent) == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "text",
    [
        "", "junk", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)  # fmt: skip
def test_what_is_no_parent_begins_a_trace(text: str) -> None:
    assert read_parent({"traceparent": text}) is None


def test_a_later_version_may_say_more() -> None:
    assert read_parent({"traceparent": f"01-{TRACE}-{SPAN}-01-more"}) is not None


def test_a_child_inherits_its_parents_trace_and_decision() -> None:
    for flags, is_sampled in (("00", False), ("01", True)):
        parent = read_parent({"traceparent": f"00-{TRACE}-{SPAN}-{flags}"})
        child = child_context(parent, 0.5)
        assert child.trace_id == int(TRACE, 16)
        assert child.span_id != int(SPAN, 16)
        assert child.trace_flags.sampled == is_sampled


def test_the_share_of_recorded_traces_is_that_of_the_setting() -> None:
    for ratio, low, high in ((0.0, 0, 0), (1.0, 2000, 2000), (0.5, 800, 1200)):
        sampled = sum(child_context(None, ratio).trace_flags.sampled for _ in range(2000))
        assert low <= sampled <= high


def test_a_span_is_current_for_propagators_and_ends_once() -> None:
    ended: list[OurSpan] = []
    span = OurSpan("work", child_context(None, 1.0), 0, SpanKind.INTERNAL, ended.append)
    span.set_attribute("a", 1)
    span.set_attributes({"b": 2})
    span.set_status(StatusCode.ERROR)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    assert carrier["traceparent"] == write_parent(span.get_span_context())
    assert span.is_recording()
    span.end()
    span.end()
    assert ended == [span]
    assert not span.is_recording()
    assert (span.attributes, span.is_error) == ({"a": 1, "b": 2}, True)
