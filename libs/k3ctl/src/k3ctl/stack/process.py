"""What a supervised process must offer."""

from typing import Protocol


class RunningProcess(Protocol):
    """A started process, as `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        ...

    async def wait(self) -> int:
        """Waits for the end; gives the code."""
        ...

    def terminate(self) -> None:
        """Asks it to end; `ProcessLookupError` if it has ended."""
        ...

    def kill(self) -> None:
        """Ends it; `ProcessLookupError` if it has ended."""
        ...
