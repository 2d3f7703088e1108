"""Effects that become true with a step: frees, unpins and seals wait for what is in flight."""

from collections import deque
from collections.abc import Callable


class StepFence:
    """A monotone counter of steps and what waits for them, in order."""

    def __init__(self) -> None:
        self._newest = 0
        self._flying: deque[int] = deque()
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()

    @property
    def newest(self) -> int:
        """Number of the newest step that was opened."""
        return self._newest

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._flying

    @property
    def num_waiting(self) -> int:
        """Effects that are not true yet."""
        return len(self._waiting)

    def open_step(self) -> int:
        """A step is about to be planned."""
        self._newest += 1
        self._flying.append(self._newest)
        return self._newest

    def after(self, effect: Callable[[], object]) -> None:
        """Run the effect once every step opened so far was closed: now, if none is in flight."""
        if not self._flying:
            effect()
        else:
            self._waiting.append((self._newest, effect))

    def close_step(self, step: int) -> None:
        """A step was reported; steps are closed in the order they were opened."""
        assert self._flying, "a step was closed that was not opened"
        assert self._flying[0] == step, "steps are closed in order"
        self._flying.popleft()
        while self._waiting and self._waiting[0][0] <= step:
            self._waiting.popleft()[1]()
