"""5,000 random steps of the whole cache here, 200,000 where K3_NIGHTLY is set."""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.cache_machine import CacheMachine

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
