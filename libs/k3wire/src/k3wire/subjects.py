"""The table of subjects: what is sent where, of which type, and who shares the work.

Calls to stateless stages go to one subject with a queue group; prefill and decode workers are
addressed one by one, because the router chose them. Cancels reach every worker of a role.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from k3wire.messages.base import Admitted, Message, PieceReply, PieceRequest, Stage
from k3wire.messages.control import Cancel, Heartbeat
from k3wire.messages.decode import CommitRequest, ReserveReply, ReserveRequest
from k3wire.messages.encode import EncodeReply, EncodeRequest
from k3wire.messages.fetch import ReadReply, ReadRequest, ResolveReply, ResolveRequest
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest
from k3wire.messages.stream import TokenFrame

ROOT = "k3"

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, R]):
    """One kind of request and its reply.

    Attributes:
        name: for spans, metrics and logs.
        request: its type.
        reply: the type of its answer.
    """

    name: str
    request: type[Q]
    reply: type[R]


AnyCall = Call[Any, Any]
"""A call of any type: the table does not care."""

RESOLVE = Call("resolve", ResolveRequest, ResolveReply)
READ = Call("read", ReadRequest, ReadReply)
PREPROCESS = Call("preprocess", PreprocessRequest, PreprocessReply)
ENCODE = Call("encode", EncodeRequest, EncodeReply)
PREFILL = Call("prefill", PrefillRequest, Admitted)
RESERVE = Call("reserve", ReserveRequest, ReserveReply)
COMMIT = Call("commit", CommitRequest, Admitted)
PIECE = Call("piece", PieceRequest, PieceReply)

CALLS: tuple[AnyCall, ...] = (
    RESOLVE,
    READ,
    PREPROCESS,
    ENCODE,
    PREFILL,
    RESERVE,
    COMMIT,
    PIECE,
)
"""Every call of the system."""

EVENTS: tuple[type[Message], ...] = (Cancel, Heartbeat, TokenFrame)
"""Every message that has no reply."""


def shared(call: AnyCall) -> str:
    """Subject of a call that any worker of the stage may answer (with a queue group)."""
    return f"{ROOT}.call.{call.name}"


def direct(call: AnyCall, worker_id: str) -> str:
    """Subject of a call to one worker."""
    return f"{ROOT}.worker.{worker_id}.{call.name}"


def cancel(role: Stage) -> str:
    """Subject on which every worker of a role hears cancels."""
    return f"{ROOT}.cancel.{role}"


def heartbeat(role: Stage, worker_id: str) -> str:
    """Subject of one worker's beats; `heartbeats()` matches all of them."""
    return f"{ROOT}.heartbeat.{role}.{worker_id}"


def heartbeats() -> str:
    """Wildcard over every worker's beats."""
    return f"{ROOT}.heartbeat.>"


def tokens(gateway_id: str) -> str:
    """Subject on which one gateway receives token frames."""
    return f"{ROOT}.gateway.{gateway_id}.tokens"
