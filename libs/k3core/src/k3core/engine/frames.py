"""From deltas to frames: one frame for each step and gateway, numbered without a gap.

Both workers that send tokens use this, so that a gateway reads one order whoever sends. Nothing
here does I/O: the caller publishes what comes out, in order.
"""

from collections.abc import Iterable

from k3wire.messages.stream import TokenDelta, TokenFrame


class FrameAssembler:
    """Groups the deltas of a step by stream subject and numbers the frames of each subject."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        """Starts every subject's count at zero.

        Args:
            worker_id: the sender.
            epoch: its start, which fences off a predecessor.
        """
        self._worker_id = worker_id
        self._epoch = epoch
        self._next_seq: dict[str, int] = {}

    def assemble(self, deltas: Iterable[tuple[str, TokenDelta]]) -> list[tuple[str, TokenFrame]]:
        """Makes the frames of one step.

        Args:
            deltas: (stream subject, delta), in order; deltas of one request must be merged.

        Returns:
            (stream subject, frame), one for each subject.
        """
        by_subject: dict[str, list[TokenDelta]] = {}
        for subject, delta in deltas:
            by_subject.setdefault(subject, []).append(delta)
        return [(subject, self._frame(subject, group)) for subject, group in by_subject.items()]

    def _frame(self, subject: str, deltas: list[TokenDelta]) -> TokenFrame:
        # A frame is a list to be read once: its numbers outlive a subject's silence on purpose,
        # since a gateway that sees a number fall takes the worker for a new one.
        seq = self._next_seq.get(subject, 0)
        self._next_seq[subject] = seq + 1
        return TokenFrame(
            worker_id=self._worker_id, epoch=self._epoch, seq=seq, deltas=tuple(deltas)
        )
