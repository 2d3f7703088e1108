"""What Mooncake's status numbers mean, and which of them are ours to act on."""

from enum import IntEnum

from k3core.transfer.base import PutOutcome


class Code(IntEnum):
    """Failures of the store that were met or read of; success is 0 or a count of bytes.

    Source: kvcache-ai/Mooncake, mooncake-store/include/types.h, at 3b5a594, and trials of 0.3.13.
    """

    INTERNAL = -1
    OVERFLOW = -10
    SEGMENT_GONE = -101
    STORE_FULL = -200
    BAD_ARGUMENT = -600
    HALF_WRITTEN = -703
    ABSENT = -704
    EXISTS = -705
    LEASED = -706
    LEASE_EXPIRED = -707
    BUSY = -708
    REPLICA_GONE = -710
    REPLICA_INVALID = -712
    BUSY_TASK = -714
    PEER_LOST = -800
    CORRUPT = -801
    MASTER_LOST = -900
    MASTER_SILENT = -901
    NOT_LEADER = -1010
    NO_LEADER = -1011


MASTER_CODES = frozenset(
    {Code.MASTER_LOST, Code.MASTER_SILENT, Code.NOT_LEADER, Code.NO_LEADER},
)
"""The master cannot serve: each further call would cost seconds."""

UNREADABLE_CODES = frozenset(
    {
        Code.SEGMENT_GONE, Code.REPLICA_GONE, Code.REPLICA_INVALID, Code.PEER_LOST, Code.CORRUPT,
    }
)  # fmt: skip
"""The master lists the object, but its bytes cannot be had; asking again at once is in vain."""


def put_outcome(status: int) -> PutOutcome:
    """What a put's status means, before anybody has looked whether the object can be read."""
    match status:
        case 0:
            return PutOutcome.STORED
        case Code.STORE_FULL:
            return PutOutcome.FULL
        case Code.EXISTS:
            return PutOutcome.PRESENT
        case _:
            return PutOutcome.FAILED


def describe(status: int) -> str:
    """Names a failure for a log: `peer_lost`, or its number if it was never met."""
    try:
        return Code(status).name.lower()
    except ValueError:
        return str(status)
