"""Which path speaks which dialect, and the paths that only say that somebody is here.

``reading.Paths`` has taken a key out of the path by now, and made sure that it begins with an API version.
"""

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from longrein.calls.chat import ChatDialect
from longrein.calls.completions import CompletionsDialect
from longrein.calls.dialect import CountingDialect, Dialect, Target
from longrein.calls.gemini import GeminiDialect
from longrein.calls.messages import MessagesDialect
from longrein.calls.responses import ResponsesDialect

if TYPE_CHECKING:
    from longrein.calls.gateway import Gateway

CHAT = ChatDialect()
COMPLETIONS = CompletionsDialect()
MESSAGES = MessagesDialect()
RESPONSES = ResponsesDialect()
GEMINI = GeminiDialect()

# Gemini's methods stand behind a colon, after a model's name that may hold slashes.
GEMINI_PATH = re.compile(r"^/(?:v1|v1beta|v1alpha)/models/(?P<model>[^:]+):(?P<method>[A-Za-z]+)$")

Endpoint = Callable[[Request], Awaitable[Response | ASGIApp]]


def dialect_of(request: Request) -> Dialect:
    """The dialect that a request's path belongs to, for errors that come before anything is read."""
    path = request.url.path
    if path.startswith(("/v1beta/", "/v1alpha/")) or GEMINI_PATH.match(path) or "x-goog-api-client" in request.headers:
        return GEMINI
    if path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        return MESSAGES
    return RESPONSES if path.startswith("/v1/responses") else CHAT


def routes(gateway: "Gateway") -> list[Route]:
    """Every path of the model endpoint."""

    def asking(dialect: Dialect) -> Endpoint:
        async def ask(request: Request) -> ASGIApp:
            return await gateway.ask(request, dialect, _target(request))

        return ask

    def counting(dialect: CountingDialect) -> Endpoint:
        async def count(request: Request) -> Response:
            return await gateway.count(request, dialect, _target(request))

        return count

    async def gemini(request: Request) -> Response | ASGIApp:
        match = GEMINI_PATH.match(request.url.path)
        method = "" if match is None else match["method"]
        if match is None or method not in ("generateContent", "streamGenerateContent", "countTokens"):
            raise HTTPException(404, f"the model has no method {method!r}")
        target = _target(request, match["model"], stream=method == "streamGenerateContent")
        if method == "countTokens":
            return await gateway.count(request, GEMINI, target)
        return await gateway.ask(request, GEMINI, target)

    async def models(request: Request) -> Response:
        gateway.rollout_of(request)
        return JSONResponse(_model_list(request, gateway.model_name))

    async def model(request: Request) -> Response:
        gateway.rollout_of(request)
        return JSONResponse(_model(request, request.path_params["name"]))

    async def no_websocket(request: Request) -> Response:
        raise HTTPException(426, "replies come over plain POST and server-sent events; do not upgrade to a WebSocket")

    async def here(request: Request) -> Response:
        return Response(status_code=200)

    return [
        _route("/v1/chat/completions", asking(CHAT), "POST"),
        _route("/v1/completions", asking(COMPLETIONS), "POST"),
        _route("/v1/messages", asking(MESSAGES), "POST"),
        _route("/v1/messages/count_tokens", counting(MESSAGES), "POST"),
        _route("/v1/responses", asking(RESPONSES), "POST"),
        _route("/v1/responses", no_websocket, "GET"),
        _route("/v1/responses/input_tokens", counting(RESPONSES), "POST"),
        *(_route(f"/{version}/models/{{name:path}}", gemini, "POST") for version in ("v1", "v1beta", "v1alpha")),
        *(_route(f"/{version}/models", models, "GET") for version in ("v1", "v1beta", "v1alpha")),
        *(_route(f"/{version}/models/{{name:path}}", model, "GET") for version in ("v1", "v1beta", "v1alpha")),
        _route("/v1", here, "HEAD"),
        _route("/v1/api/hello", here, "HEAD"),
    ]


def _target(request: Request, model: str = "", *, stream: bool = False) -> Target:
    return Target(model, stream, dict(request.query_params), dict(request.headers))


def _route(path: str, endpoint: Endpoint, method: str) -> Route:
    return Route(path, endpoint, methods=[method])


def _model_list(request: Request, name: str) -> dict[str, object]:
    if dialect_of(request) is GEMINI:
        return GEMINI.models([name])
    data = [_model(request, name)]
    if dialect_of(request) is MESSAGES:
        return {"data": data, "has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": data}


def _model(request: Request, name: str) -> dict[str, object]:
    if dialect_of(request) is GEMINI:
        return GEMINI.model(name)
    if dialect_of(request) is MESSAGES:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "longrein"}
