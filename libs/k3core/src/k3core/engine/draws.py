"""The one source of randomness: a uniform number from (seed, output position), and nothing else.

A counter-based generator has no state to hand over. Whoever knows a request's seed and the
position of its next token draws the number that any other worker would have drawn, so a request
may move between workers, be retried, or share a batch without changing its answer.

Source: the finaliser is SplitMix64's (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), applied to the seed and then to the seed's image plus the counter.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MANTISSA_BITS = 53


def uniform(seed: int, position: int) -> float:
    """Draws the number of one output position.

    Args:
        seed: the request's seed; taken modulo 2**64, so negative seeds are fine.
        position: output position, 0 for the first token of the answer.

    Returns:
        A multiple of 2**-53 in [0, 1).
    """
    key = _mix(seed & _MASK)
    bits = _mix((key + (position + 1) * _GOLDEN) & _MASK)
    return (bits >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS


def _mix(value: int) -> int:
    """Scatters 64 bits over 64 bits, one to one."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
