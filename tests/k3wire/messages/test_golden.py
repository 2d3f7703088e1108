"""The bytes of every message, held as they were sent by the first release.

A field that is added shows up as a new golden file under review; the old one moves to `old/` and
must still be read. `python tests/k3wire/messages/make_golden.py` writes what is missing.
"""

import importlib
import pkgutil
from pathlib import Path

import msgspec
import pytest
from support.message_examples import EXAMPLES, all_messages

import k3wire.messages
from k3wire.bus import codec
from k3wire.errors import InternalError
from k3wire.messages.base import MAX_MESSAGE_BYTES, PIECE_BYTES, Message, PieceReply

GOLDEN = Path(__file__).parent / "golden"
OLD = sorted((GOLDEN / "old").glob("*.msgpack"))

for module in pkgutil.iter_modules(k3wire.messages.__path__, "k3wire.messages."):
    importlib.import_module(module.name)


def name(message: Message) -> str:
    return type(message).__name__


def test_every_message_has_an_example_and_no_golden_is_left_over() -> None:
    ours = {kind for kind in all_messages() if kind.__module__.startswith("k3wire.")}
    assert {type(example) for example in EXAMPLES} == ours
    files = {path.stem for path in GOLDEN.glob("*.msgpack")}
    assert files == {kind.__name__ for kind in ours}


def test_tags_are_unique_and_forms_are_those_of_the_house() -> None:
    tags = [type(example).__struct_config__.tag for example in EXAMPLES]
    assert None not in tags
    assert len(set(tags)) == len(tags)
    for example in EXAMPLES:
        config = type(example).__struct_config__
        assert (config.frozen, config.array_like) == (True, False)
        with pytest.raises(TypeError):
            type(example)(*msgspec.structs.astuple(example))


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_leave_no_field_at_its_default(example: Message) -> None:
    for field in msgspec.structs.fields(type(example)):
        if not field.required:
            default = (
                field.default_factory()
                if field.default_factory is not msgspec.NODEFAULT
                else field.default
            )
            assert getattr(example, field.name) != default, field.name


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_bytes_are_those_of_the_golden_file(example: Message) -> None:
    golden = (GOLDEN / f"{name(example)}.msgpack").read_bytes()
    assert codec.encode(example) == golden
    assert codec.decode(golden, type(example)) == example


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_bytes_of_an_older_release_are_still_read(path: Path) -> None:
    kinds = {kind.__name__: kind for kind in all_messages()}
    kind = kinds[path.stem.split("-")[0]]
    data = path.read_bytes()
    old = codec.decode(data, kind)
    fields = msgspec.msgpack.decode(data)
    for field in msgspec.structs.fields(kind):
        value = getattr(old, field.name)
        if field.name in fields:
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
            assert again == fields[field.name]
        else:
            default = (
                field.default_factory()
                if field.default_factory is not msgspec.NODEFAULT
                else field.default
            )
            assert value == default


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_fields_of_a_newer_release_are_ignored(example: Message) -> None:
    fields = msgspec.msgpack.decode(codec.encode(example))
    newer = msgspec.msgpack.encode({**fields, "a_field_of_tomorrow": [1, {"deep": b"x"}]})
    assert codec.decode(newer, type(example)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_cut_bytes_and_other_messages_are_refused(example: Message) -> None:
    data = codec.encode(example)
    other = EXAMPLES[0] if example is not EXAMPLES[0] else EXAMPLES[1]
    for wrong in (data[:-1], b"", b"\xc0", codec.encode(other)):
        with pytest.raises(InternalError):
            codec.decode(wrong, type(example))


def test_a_whole_piece_fits_one_message() -> None:
    assert len(codec.encode(PieceReply(data=b"x" * PIECE_BYTES))) < MAX_MESSAGE_BYTES
    with pytest.raises(InternalError):
        codec.encode(PieceReply(data=b"x" * MAX_MESSAGE_BYTES))
