"""A prompt, however it came: inside the message, or held by the gateway piece by piece."""

import msgspec

from k3wire.bus.base import Bus
from k3wire.errors import InternalError
from k3wire.messages.prompt import PromptPayload, PromptSource, decode_prompt
from k3wire.service.pieces import read_blob


async def read_prompt(bus: Bus, source: PromptSource, deadline_unix_ns: int) -> PromptPayload:
    """Reads a prompt from its source.

    Raises:
        InternalError: there is none, or its bytes are no prompt.
        BlobLost: nobody holds it any more.
        DeadlineExceeded: no time was left.
    """
    if source.inline is not None:
        return source.inline
    if source.blob is None:
        raise InternalError("The request has no prompt.")
    data = await read_blob(bus, None, source.blob, deadline_unix_ns)
    try:
        return decode_prompt(data)
    except msgspec.DecodeError as error:
        raise InternalError("The prompt cannot be read.") from error
