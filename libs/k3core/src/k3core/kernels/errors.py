"""Errors of the kernels' room."""


class BackendUnavailableError(RuntimeError):
    """A kernel backend that cannot run here; the message says what is missing."""
