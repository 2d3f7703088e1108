"""How messages and replies become bytes, the same for every bus."""

import functools
from typing import TypeVar

import msgspec

from k3wire.errors import ErrorInfo, InternalError, K3Error, from_info
from k3wire.messages.base import MAX_MESSAGE_BYTES, Message

R = TypeVar("R", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_error_decoder = msgspec.msgpack.Decoder(ErrorInfo)


@functools.cache
def _decoder_of(message_type: type[R]) -> msgspec.msgpack.Decoder[R]:
    # One for each type of message, of which there are few; making one costs more than using it.
    return msgspec.msgpack.Decoder(message_type)


def encode(message: Message) -> bytes:
    """Encodes a message for the bus.

    Raises:
        InternalError: it is longer than `MAX_MESSAGE_BYTES`; send a `BlobRef` instead.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise InternalError(
            f"A {type(message).__name__} of {len(data)} bytes is over the bus's limit of "
            f"{MAX_MESSAGE_BYTES}; send it by reference"
        )
    return data


def encode_error(error: K3Error) -> bytes:
    """Encodes an error as a reply; an overlong message is cut."""
    info = error.to_info()
    return _encoder.encode(msgspec.structs.replace(info, message=info.message[:2000]))


def decode(data: bytes, message_type: type[R]) -> R:
    """Decodes a message; unknown fields of a newer peer are ignored.

    Raises:
        InternalError: the bytes are no such message.
    """
    try:
        return _decoder_of(message_type).decode(data)
    except msgspec.DecodeError as error:
        raise InternalError("A peer sent a message that cannot be read") from error


def decode_reply(data: bytes, reply_type: type[R]) -> R:
    """Decodes a reply, or raises the error it carries.

    Raises:
        K3Error: what the other side answered.
        InternalError: the bytes are neither.
    """
    try:
        return _decoder_of(reply_type).decode(data)
    except msgspec.DecodeError as error:
        try:
            info = _error_decoder.decode(data)
        except msgspec.DecodeError:
            raise InternalError("A peer sent a reply that cannot be read") from error
    raise from_info(info)
