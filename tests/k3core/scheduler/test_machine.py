"""5,000 random steps of the whole cache here, 200,000 where K3_NIGHTLY is set."""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.cache_machine import CacheMachine

from k3core.cache.spec import CacheConfig

_STEPS_EACH = 50
_STEPS = 200_000 if os.environ.get("K3_NIGHTLY") else 5_000


def test_random_lives_keep_every_invariant() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=_STEPS // _STEPS_EACH,
            stateful_step_count=_STEPS_EACH,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_state_left_by_one_taken_off_for_room_is_checked_from_then_on() -> None:
    machine = CacheMachine()
    sizes = {"unit_tokens": 4, "page_units": 1, "num_pages": 13, "checkpoint_grid": 4}
    machine.start(CacheConfig(**sizes, export_alignment=1), chunks=(9,), rows=2)
    long, short = ("stem", 22, "left", 0, None, 14), ("stem", 1, "left", 0, None, 5)
    machine.submit("r1", long, output=2, salt="", accepted=[], steps=4, is_sent=False)
    machine.submit("r0", short, output=0, salt="", accepted=[], steps=1, is_sent=False)
    machine.interrupted_step("r0", is_preempted=False, second=False)
    assert machine.runner.tracks["r0"].exported == [4]
    machine.nothing_is_wrong()
    machine.teardown()
