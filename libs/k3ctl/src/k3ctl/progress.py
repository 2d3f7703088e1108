"""A progress bar on standard error, silent where nobody watches."""

import sys
from collections.abc import Callable

BAR_CELLS = 30


def stderr_bar(label: str) -> Callable[[int, int, int], None] | None:
    """A callback (done, total, bytes done) that draws a bar, or None off a terminal."""
    if not sys.stderr.isatty():
        return None
    shown = -1

    def draw(num_done: int, num_total: int, bytes_done: int) -> None:
        nonlocal shown
        percent = 100 * num_done // max(num_total, 1)
        if percent == shown:
            return
        shown = percent
        cells = BAR_CELLS * num_done // max(num_total, 1)
        bar = "#" * cells + "." * (BAR_CELLS - cells)
        end = "\n" if num_done == num_total else ""
        print(
            f"\r{label} [{bar}] {percent:3d} % {bytes_done / 1e9:.2f} GB",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    return draw
