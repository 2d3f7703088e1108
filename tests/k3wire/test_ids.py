"""Identifiers: fresh, opaque and safe wherever they go."""

import re

import pytest

from k3wire import subjects
from k3wire.ids import is_client_request_id, new_request_id, new_worker_id


def test_ids_are_fresh_and_safe_in_subjects_files_and_headers() -> None:
    ids = [new_request_id() for _ in range(1000)] + [new_worker_id("decode") for _ in range(1000)]
    assert len(set(ids)) == 2000
    assert all(re.fullmatch(r"[a-z]+-[0-9a-f]{24}", made) for made in ids)
    assert all(map(is_client_request_id, ids))


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [("a", True), ("A.b_c-9", True), ("x" * 128, True), ("", False), ("x" * 129, False),
     ("a b", False), ("a\n", False), ("a/b", False), ("\u00e9", False), ("\u0661", False)],
)  # fmt: skip
def test_a_clients_request_id_is_echoed_only_if_it_is_harmless(text: str, is_fine: bool) -> None:
    assert is_client_request_id(text) is is_fine


def test_subjects_of_calls_and_workers_never_meet() -> None:
    shared = [subjects.shared(call) for call in subjects.CALLS]
    direct = [subjects.direct(call, w) for call in subjects.CALLS for w in ("a-1", "b-1")]
    others = [
        subjects.cancel("encoder"), subjects.cancel("decode"), subjects.tokens("gateway-1"),
        subjects.heartbeat("decode", "a-1"),
    ]  # fmt: skip
    every = [*shared, *direct, *others]
    assert len(set(every)) == len(every)
    assert all(re.fullmatch(r"k3(\.[a-z0-9-]+)+", subject) for subject in every)
    assert subjects.heartbeat("decode", "a-1").startswith(subjects.heartbeats()[:-1])
    assert len({call.name for call in subjects.CALLS}) == len(subjects.CALLS)
