"""One tree of errors: unique codes, statuses that mean something, and a way over the wire."""

import pytest

from k3wire.errors import (
    ErrorInfo,
    InternalError,
    K3Error,
    NotFound,
    SlowDown,
    all_errors,
    from_info,
)

LEAVES = [error for error in all_errors() if error is not K3Error]


def test_codes_are_unique_and_fit_for_machines() -> None:
    codes = [error.code for error in LEAVES]
    assert len(set(codes)) == len(codes)
    assert all(code.isascii() and code.replace("_", "").isalnum() for code in codes)


@pytest.mark.parametrize("error", LEAVES, ids=lambda error: error.code)
def test_every_error_has_a_code_a_status_and_a_type_of_its_own_making(error: type[K3Error]) -> None:
    assert "code" in vars(error) or error is InternalError
    assert error.http_status in {400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 503, 504}
    assert error.error_type in {"invalid_request_error", "rate_limit_error", "server_error"}
    # What a client sent cannot become right by sending it again; what we lack may come back.
    assert error.is_retryable == (error.http_status in {429, 503})
    if error.http_status == 400:
        assert error.error_type == "invalid_request_error"
    assert error.__doc__


@pytest.mark.parametrize("error", LEAVES, ids=lambda error: error.code)
def test_every_error_travels_as_itself(error: type[K3Error]) -> None:
    sent = error("what to change", param="messages[0]", retry_after_s=1.5)
    came = from_info(sent.to_info())
    assert type(came) is error
    assert came.to_info() == sent.to_info()
    assert str(came) == "what to change"


def test_an_error_of_a_newer_release_is_our_fault_and_keeps_its_text() -> None:
    came = from_info(ErrorInfo(code="invented_tomorrow", message="text"))
    assert (type(came), came.message, came.http_status) == (InternalError, "text", 500)


def test_parents_come_before_children() -> None:
    order = all_errors()
    for error in LEAVES:
        assert order.index(error.__bases__[0]) < order.index(error)
    assert issubclass(SlowDown, K3Error)
    assert NotFound in order
