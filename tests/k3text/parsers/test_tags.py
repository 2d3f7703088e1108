import pytest

from k3text.parsers.tags import Tag, may_become_tag, parse_tag, unescape_attribute


def test_a_header_gives_name_and_unescaped_attributes() -> None:
    header = b' call  tool = "a&quot;b&amp;quot;" index="1"\n'
    assert parse_tag(header) == Tag("call", {"tool": 'a"b&quot;', "index": "1"})
    assert parse_tag('argument key="k\n中=\' " type=""'.encode()) == Tag(
        "argument", {"key": "k\n中=' ", "type": ""}
    )
    assert parse_tag(b'call tool="a" tool="b"') == Tag("call", {"tool": "a"})


@pytest.mark.parametrize("header", [b"", b"  ", b"Hi, you!", b'call tool="a', b"call tool", b"1"])
def test_text_is_no_tag(header: bytes) -> None:
    assert parse_tag(header) is None


def test_the_beginning_of_a_known_tag_is_told_from_text() -> None:
    for header in (b"", b" ", b"m", b" mess", b"message ", b'call tool="x', b"think"):
        assert may_become_tag(header)
    for header in (b"x", b"messages", b"mess ", b"The", b"calling", b"\xff"):
        assert not may_become_tag(header)


def test_escapes_are_undone_in_the_order_that_undoes_escaping() -> None:
    for value in ('"', "&", "&quot;", "&amp;", '&amp;quot;"&', "<>'"):
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        assert unescape_attribute(escaped) == value
