"""A pure lookup, told in the words of a scenario's results."""

from k3core.cache.match import Match
from k3core.simulate.scenario_file import Json


def match_result(match: Match, n: int) -> dict[str, Json]:
    """What a prompt of n tokens would reuse now."""
    return {
        "prompt_tokens": n,
        "hit": match.hit,
        "hit_local": match.local_hit,
        "hit_remote": match.hit - match.local_hit,
        "checkpoint": match.hit or None,
        "computed": n - match.hit,
        "matched": match.matched,
        "junction": match.junction or None,
        "reuse_gap": match.gap,
        "reason": match.reason or None,
    }
