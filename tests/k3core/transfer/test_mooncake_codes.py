"""Every number of the library has a meaning here."""

import pytest

from k3core.transfer.base import PutOutcome
from k3core.transfer.mooncake_codes import (
    MASTER_CODES,
    UNREADABLE_CODES,
    Code,
    describe,
    put_outcome,
)


@pytest.mark.parametrize("code", Code)
def test_no_failure_is_taken_for_success(code: Code) -> None:
    assert put_outcome(code) is not PutOutcome.STORED
    assert describe(code) == code.name.lower()


def test_a_number_that_was_never_met_is_a_failure_and_keeps_its_number() -> None:
    assert put_outcome(-4242) is PutOutcome.FAILED
    assert describe(-4242) == "-4242"


def test_a_missing_object_neither_opens_the_circuit_nor_is_quarantined() -> None:
    assert Code.ABSENT not in MASTER_CODES | UNREADABLE_CODES
