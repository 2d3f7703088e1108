"""One tree of errors for all services; each leaf has a stable code and an HTTP status.

    K3Error
    ├── InvalidRequest 400            invalid_value
    │   ├── InvalidJson               invalid_json
    │   ├── UnsupportedParameter      unsupported_parameter
    │   ├── ContextLengthExceeded     context_length_exceeded
    │   └── ImageError                (one leaf for each OpenAI image code)
    ├── Unauthorized 401              invalid_api_key
    ├── ModelNotFound 404, NotFound 404, MethodNotAllowed 405
    ├── RequestTooLarge 413, UnsupportedMediaType 415
    ├── SlowDown 429                  slow_down        capacity exists, but is taken
    ├── Overloaded 503                server_is_overloaded  no route at all
    ├── WorkerLost 503, ShuttingDown 503, NoResponders 503
    ├── DeadlineExceeded 504
    ├── Cancelled 499                 client_closed, for logs only
    ├── TierUnavailable 503           a cache tier or the data plane did not answer; never fatal
    └── InternalError 500

A message is fit for a user: it names what is wrong and what to change, never a path, an
address, a key, another tenant or the text of a lower library's exception. Those go to the log
through `raise … from …`.
"""

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """An error as it travels: what `K3Error` carries, without its traceback."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class K3Error(Exception):
    """Root of the tree.

    Attributes:
        code: stable machine-readable name, unique in the tree.
        http_status: status the gateway answers with.
        error_type: OpenAI's `type` field.
        is_retryable: whether the same request may succeed later or elsewhere.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    is_retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_info(self) -> ErrorInfo:
        """Gives the error's wire form."""
        return ErrorInfo(
            code=self.code, message=self.message, param=self.param, retry_after_s=self.retry_after_s
        )


class InternalError(K3Error):
    """A fault of ours; the message stays generic."""


class InvalidRequest(K3Error):
    """The request is malformed or has a value out of range."""

    code = "invalid_value"
    http_status = 400
    error_type = "invalid_request_error"


class InvalidJson(InvalidRequest):
    """The body is not acceptable JSON."""

    code = "invalid_json"


class UnsupportedParameter(InvalidRequest):
    """A parameter that this server refuses."""

    code = "unsupported_parameter"


class UnsupportedContentPart(InvalidRequest):
    """A content part of a type that is not served."""

    code = "unsupported_content_part"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and requested output, exceed the model's context."""

    code = "context_length_exceeded"


class ImageError(InvalidRequest):
    """An image of the request cannot be used; parent of the image codes."""

    code = "invalid_image"


class InvalidImageUrl(ImageError):
    """URL malformed, of a refused scheme, or of a refused host."""

    code = "invalid_image_url"


class FailedToDownloadImage(ImageError):
    """The image's host did not deliver it."""

    code = "failed_to_download_image"


class InvalidBase64Image(ImageError):
    """A data URL whose payload does not decode."""

    code = "invalid_base64_image"


class EmptyImageFile(ImageError):
    """No bytes."""

    code = "empty_image_file"


class ImageParseError(ImageError):
    """The bytes are no whole picture."""

    code = "image_parse_error"


class UnsupportedImageMediaType(ImageError):
    """A format outside the allow-list."""

    code = "unsupported_image_media_type"


class ImageTooLarge(ImageError):
    """More pixels than allowed."""

    code = "image_too_large"


class ImageTooSmall(ImageError):
    """Fewer pixels than the model can take."""

    code = "image_too_small"


class ImageFileTooLarge(ImageError):
    """More encoded bytes than allowed."""

    code = "image_file_too_large"


class TooManyImages(ImageError):
    """More images than allowed in one request."""

    code = "too_many_images"


class Unauthorized(K3Error):
    """Missing or wrong API key."""

    code = "invalid_api_key"
    http_status = 401
    error_type = "invalid_request_error"


class NotFound(K3Error):
    """No such path or object."""

    code = "not_found"
    http_status = 404
    error_type = "invalid_request_error"


class ModelNotFound(NotFound):
    """The requested model is not served here."""

    code = "model_not_found"


class MethodNotAllowed(K3Error):
    """The path exists, with other methods."""

    code = "method_not_allowed"
    http_status = 405
    error_type = "invalid_request_error"


class RequestTimeout(K3Error):
    """The client sent its body too slowly."""

    code = "request_timeout"
    http_status = 408
    error_type = "invalid_request_error"


class RequestTooLarge(K3Error):
    """The body is over the limit."""

    code = "request_too_large"
    http_status = 413
    error_type = "invalid_request_error"


class UnsupportedMediaType(K3Error):
    """The body is not plain JSON."""

    code = "unsupported_media_type"
    http_status = 415
    error_type = "invalid_request_error"


class SlowDown(K3Error):
    """Capacity exists but is taken; try again later."""

    code = "slow_down"
    http_status = 429
    error_type = "rate_limit_error"
    is_retryable = True


class Overloaded(K3Error):
    """No healthy route, loading, or draining."""

    code = "server_is_overloaded"
    http_status = 503
    is_retryable = True


class WorkerLost(K3Error):
    """A worker died before the answer was complete."""

    code = "worker_lost"
    http_status = 503
    is_retryable = True


class NoResponders(K3Error):
    """No process listens on the subject."""

    code = "no_responders"
    http_status = 503
    is_retryable = True


class ShuttingDown(K3Error):
    """The process drains and takes no more work."""

    code = "server_shutting_down"
    http_status = 503
    is_retryable = True


class TierUnavailable(K3Error):
    """A cache tier or the data plane did not answer; the caller computes instead."""

    code = "tier_unavailable"
    http_status = 503
    is_retryable = True


class BlobLost(K3Error):
    """The bytes a reference names are gone from every holder."""

    code = "blob_lost"
    http_status = 503
    is_retryable = True


class DeadlineExceeded(K3Error):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    http_status = 504


class Cancelled(K3Error):
    """The client left, or the caller gave up; never shown to anybody."""

    code = "client_closed"
    http_status = 499


def all_errors() -> tuple[type[K3Error], ...]:
    """Lists every class of the tree, the root first, parents before children."""
    found: list[type[K3Error]] = [K3Error]
    for error in found:
        found.extend(error.__subclasses__())
    return tuple(found)


def from_info(info: ErrorInfo) -> K3Error:
    """Rebuilds the error a peer sent; a code of a newer release becomes `InternalError`."""
    kinds = {error.code: error for error in all_errors() if error is not K3Error}
    kind = kinds.get(info.code, InternalError)
    return kind(info.message, param=info.param, retry_after_s=info.retry_after_s)
