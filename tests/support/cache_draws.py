"""What the random lives of a cache are drawn from: configurations and prompts that meet often."""

from hypothesis import strategies as st

from k3core.cache.spec import CacheConfig, Retention
from k3core.simulate.streams import image_key

UNIT = 4
NAMES = [f"r{i}" for i in range(6)]


def _alike() -> list[str]:
    """Two pictures whose keys begin with the same 16 bits, to be told apart by the rest."""
    first: dict[bytes, str] = {}
    for number in range(5000):
        name = f"picture {number}"
        other = first.setdefault(image_key(name)[:2], name)
        if other != name:
            return [other, name]
    raise AssertionError("16 bits hold no 5,000 pictures apart")


_PICTURES = _alike()

_RETENTIONS = [
    Retention(),
    Retention(prompt_end=False, unit_end=True),
    Retention(prompt_end=False, dense=True),
    Retention(dense=True, decode_grid=8),
    Retention(opportunistic=True),
    Retention(intervals=(16,)),
    Retention(prompt_end=False),
]

configs = st.builds(
    CacheConfig,
    unit_tokens=st.just(UNIT),
    page_units=st.sampled_from([1, 2, 3]),
    num_pages=st.integers(12, 30),
    num_slots=st.integers(3, 12),
    state_groups=st.sampled_from([1, 2]),
    checkpoint_grid=st.sampled_from([4, 8]),
    export_alignment=st.sampled_from([1, 4, 8]),
    export_mode=st.sampled_from(["in_pass", "in_pass", "align", "partial"]),
    partial_hits=st.sampled_from([True, True, False]),
    retention=st.sampled_from(_RETENTIONS),
    promotion=st.sampled_from(["second_hit", "never", "markers"]),
    draft=st.sampled_from(["off", "drop", "no_drop", "replay"]),
    replay_tokens=st.sampled_from([1, 3, 6]),
    path_cap=st.sampled_from([-1, -1, 1, 2]),
    codec=st.sampled_from(["raw", "raw", "int8"]),
    eviction=st.sampled_from(["lru", "lru", "marconi"]),
    memory=st.sampled_from(["two_pools", "flat", "two_ended_lazy", "two_ended_eager"]),
    page_bytes=st.just(12),
    host_bytes=st.sampled_from([0, 0, 60, 400]),
)
# Prompts come from a small tree: a shared stem, one of three branches, a tail of one's own.
# Few lengths, so that prompts often share exactly as much as is interesting.
_LENGTHS = st.sampled_from([0, 0, 3, 4, 9])
prompts = st.tuples(
    st.sampled_from(["stem", "stem", "other"]),
    st.sampled_from([1, 4, 8, 11, 16, 22]),
    st.sampled_from(["left", "right"]),
    _LENGTHS,
    st.sampled_from([None, *_PICTURES]),
    _LENGTHS,
)


def segments_of(prompt: tuple[str, int, str, int, str | None, int]) -> list[object]:
    """The segments that a drawn prompt stands for."""
    stem, stem_length, branch, branch_length, picture, tail_length = prompt
    found: list[object] = [[stem, 0, stem_length], {"mark": True}]
    if picture is not None:
        found.append({"image": picture, "tokens": 5})
    return [*found, [branch, 0, branch_length], ["tail", 0, tail_length]]
