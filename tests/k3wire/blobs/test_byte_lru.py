"""The cache that is bounded by bytes, against the plainest model of it."""

from hypothesis import given
from hypothesis import strategies as st

from k3wire.blobs.byte_lru import ByteLru

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 12)),
        st.tuples(st.just("get"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS, st.integers(0, 30))
def test_it_behaves_like_a_list_in_order_of_use(
    steps: list[tuple[str, int, int]], capacity: int
) -> None:
    cache: ByteLru[int, bytes] = ByteLru(capacity, len)
    model: list[tuple[int, bytes]] = []
    num_evicted = 0
    for index, (kind, key, size) in enumerate(steps):
        held = next((pair for pair in model if pair[0] == key), None)
        if kind == "get":
            assert cache.get(key) == (held[1] if held else None)
            if held:
                model.remove(held)
                model.append(held)
        elif kind == "remove":
            assert cache.remove(key) == (held[1] if held else None)
            model = [pair for pair in model if pair != held]
        else:
            value = bytes([index % 256]) * size
            model = [pair for pair in model if pair != held]
            assert cache.put(key, value) is (size <= capacity)
            if size <= capacity:
                while sum(len(v) for _, v in model) + size > capacity:
                    model.pop(0)
                    num_evicted += 1
                model.append((key, value))
        assert cache.size_bytes == sum(len(v) for _, v in model) <= capacity
        assert len(cache) == len(model)
        assert cache.num_evicted == num_evicted
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)
