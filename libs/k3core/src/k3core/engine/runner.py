"""What turns a plan into tokens. Implementations: `torch_runner` and `scripted_runner`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from k3core.engine.words import Adoption, EngineRequest
from k3core.scheduler.plan import RowResult, StepPlan


class ModelRunner(Protocol):
    """The forward pass and the choice of tokens, over an arena of pages that it owns.

    Every method runs on the engine's thread. A runner keeps nothing about a request but what
    `begin` gave it and what it said since.
    """

    def open(self) -> None:
        """Gets ready for the first step: warms up what is slow the first time."""
        ...

    def begin(self, request: EngineRequest, adoption: Adoption | None) -> None:
        """Learns of a request before its first row.

        Args:
            request: what a row's token depends on.
            adoption: how it came in, if another worker prefilled it.

        Raises:
            K3Error: the runner cannot serve it.
        """
        ...

    def forget(self, key: str) -> None:
        """Forgets a request; one that is not known is fine."""
        ...

    def provide_image(self, key: str, index: int, data: memoryview) -> None:
        """Takes the embeddings of one image: [tokens, hidden], packed, in the model's dtype.

        The memory stays the caller's and must keep its bytes until the request is prefilled or
        forgotten.
        """
        ...

    def held(self, now_s: float) -> Mapping[str, float]:
        """Requests whose next row must not run yet, with the monotonic times it may."""
        ...

    def frame_tokens(self, key: str) -> int:
        """How many tokens of this request should reach the stream together; 1 as a rule."""
        ...

    def execute(self, plan: StepPlan) -> Sequence[RowResult]:
        """Runs one step: spills, moves, restores, loads, the pass with its exports, encodes; samples.

        A plan without rows may still have copies to make.

        Returns:
            One result for each row, in the plan's order.

        Raises:
            RowError: one row cannot be computed; the step counts as not run.
        """
        ...

    def close(self) -> None:
        """Lets go of everything."""
        ...
