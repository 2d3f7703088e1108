"""When requests are sent: open loop, so that a slow server cannot slow its own test down."""

import random
from collections.abc import Iterator


def constant(rate_rps: float, duration_s: float) -> Iterator[float]:
    """Yields send times in seconds from the start, evenly spaced."""
    for index in range(int(rate_rps * duration_s)):
        yield index / rate_rps


def poisson(rate_rps: float, duration_s: float, seed: int) -> Iterator[float]:
    """Yields send times of a Poisson process with the given mean rate."""
    generator = random.Random(seed)
    now_s = generator.expovariate(rate_rps)
    while now_s < duration_s:
        yield now_s
        now_s += generator.expovariate(rate_rps)


def burst(rate_rps: float, duration_s: float, factor: float, seed: int) -> Iterator[float]:
    """Yields a Poisson process whose middle third runs at `factor` times the rate."""
    third_s = duration_s / 3
    rates = (rate_rps, rate_rps * factor, rate_rps)
    for index, rate in enumerate(rates):
        for now_s in poisson(rate, third_s, seed + index):
            yield index * third_s + now_s
