"""The HTTP application: routes, request ids, and every error in OpenAI's shape."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k3_gateway.openai.chat_completions import ChatAnswer, ChatService, HttpResponse
from k3_gateway.openai.errors import error_response
from k3_gateway.pipeline import ServedModel
from k3wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    K3Error,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
)
from k3wire.ids import is_client_request_id, new_request_id
from k3wire.telemetry import metrics

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=HttpResponse)

WRITE_STALL_S = 60.0
"""How long a client may read nothing of what waits for it; its place is then given up."""

VERSION = "0.1.0"
REQUEST_ID_HEADER = "x-request-id"
CHAT_PATH = "/v1/chat/completions"


def build_app(chat: ChatService, model: ServedModel, why_not_ready: Callable[[], str]) -> ASGIApp:
    """Makes the application.

    Args:
        chat: the endpoint's service.
        model: what is served.
        why_not_ready: "" while requests can be answered.
    """
    app = FastAPI(
        title="Kimi K3",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # A redirect would take its target from the client's Host header.
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_probes(app, why_not_ready)
    _add_models(app, chat, model)

    # A plain route, of which only refusals of other methods are left: a chat request does not pass
    # through the framework, whose eight layers cost as much as the rest of its way.
    endpoint = ChatEndpoint(chat)
    app.router.routes.append(Route(CHAT_PATH, endpoint, methods=["POST"]))

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        is_chat = scope["type"] == "http" and scope["path"] == CHAT_PATH
        direct = is_chat and scope["method"] == "POST"
        await (endpoint if direct else app)(scope, receive, send)

    return serve


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """The chat route: asks the service, sends the answer, frees what the answer held."""

    chat: ChatService
    write_stall_s: float = WRITE_STALL_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request = Request(scope, receive)
        request_id = new_request_id()
        try:
            answer = await self.chat.create(request, request_id)
        except K3Error as error:
            if error.http_status >= 500:
                logger.warning("request failed", extra={"request": request_id, "code": error.code})
            answer = _refused(error)
        except Exception:
            # This is the boundary of a request that does not pass through the framework.
            logger.exception("request broke", extra={"request": request_id})
            answer = _refused(InternalError("Something went wrong on our side"))

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self.write_stall_s):
                await send(message)

        response = _name(request, answer.response, request_id)
        try:
            await response(scope, receive, send_in_time)
        except TimeoutError:
            logger.info("client reads no more", extra={"request": request_id})
        finally:
            # A client that left at the last moment: the stream is never begun, nor ends itself.
            if answer.close is not None:
                await answer.close(Cancelled.code)


def _refused(error: K3Error) -> ChatAnswer:
    metrics.REQUESTS.labels(error.code).inc()
    return ChatAnswer(error_response(error))


def _name(request: Request, response: R, request_id: str = "") -> R:
    """Writes the client's request id, or ours, on a response."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    is_sound = is_client_request_id(given)
    response.headers[REQUEST_ID_HEADER] = given if is_sound else request_id or new_request_id()
    return response


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    async def on_http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            found: K3Error = MethodNotAllowed(f"{request.method} is not allowed on this path")
        elif status == 404:
            found = NotFound("There is no such path; the API is under /v1")
        else:
            found = InvalidRequest("The request cannot be read")
        return _name(request, error_response(found))

    async def on_any(request: Request, error: Exception) -> Response:
        return _name(request, error_response(InternalError("Something went wrong on our side")))

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_any)

    @app.exception_handler(K3Error)
    async def on_ours(request: Request, error: K3Error) -> Response:
        return _name(request, error_response(error))


def _add_probes(app: FastAPI, why_not_ready: Callable[[], str]) -> None:
    async def health() -> Response:
        return _json({"status": "ok"})

    for path in ("/health", "/healthz", "/ping"):
        app.add_api_route(path, health, methods=["GET"])

    @app.get("/ready")
    async def ready() -> Response:
        reason = why_not_ready()
        body = {"status": "not ready", "reason": reason} if reason else {"status": "ready"}
        return _json(body, 503 if reason else 200)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": VERSION})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.REGISTRY), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, chat: ChatService, model: ServedModel) -> None:
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "k3",
        "max_model_len": model.max_context_tokens,
    }

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        chat.keys.authenticate(request.headers)
        return _name(request, _json({"object": "list", "data": [card]}))

    @app.get("/v1/models/{name:path}")
    async def show_model(request: Request, name: str) -> Response:
        chat.keys.authenticate(request.headers)
        if name != model.name:
            raise ModelNotFound(f"The model {name[:80]!r} is not served here", param="model")
        return _name(request, _json(card))
