"""What the sandbox and its workers say to each other, over the worker's standard streams.

Each message is a four-byte big-endian length and a msgpack struct. Bulk bytes do not pass here:
two shared memory files of fixed size carry the encoded image in and the byte patches out.
"""

import struct

import msgspec

from k3text.images.config import ProcessorConfig
from k3text.images.header import ImageLimits
from k3wire.errors import ErrorInfo

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 64 * 1024


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """First message to a worker.

    Attributes:
        config: how images become patches.
        limits: what is refused.
        input_fd: shared memory that holds the encoded image.
        input_bytes: its size.
        output_fd: shared memory that takes the patches.
        output_bytes: its size.
        memory_bytes: address space that decoding may add.
        cpu_s: processor time of one image.
    """

    config: ProcessorConfig
    limits: ImageLimits
    input_fd: int
    input_bytes: int
    output_fd: int
    output_bytes: int
    memory_bytes: int
    cpu_s: int


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """An encoded image lies in the input, `num_bytes` long."""

    num_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker has locked itself in and takes jobs."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Byte patches lie in the output, row-major [N, 3, P, P].

    Attributes:
        grid_thw: patches in time, height and width.
        width: pixels of the original, as seen.
        height: likewise.
        num_tokens: merged patches.
    """

    grid_thw: tuple[int, int, int]
    width: int
    height: int
    num_tokens: int


Reply = Ready | Done | ErrorInfo


def frame(message: msgspec.Struct) -> bytes:
    """Gives a message's bytes with its length before them."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
