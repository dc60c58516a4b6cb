"""What comes in: the path with its key, the body with its limits.

Everything wrong with a request is an error for the client to read, whatever it has sent.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from longrein.errors import CallError, InvalidRequest

log = logging.getLogger(__name__)

BODY_S = 60.0
"""Longest time a request body may take to arrive."""

MOST_NESTED = 200
"""Objects and lists within one another: far more than a tool's schema has, and few enough for whoever reads on."""

VERSIONED = re.compile(r"^/v1(beta|alpha)?(/|$)")
KEY_IN_PATH = re.compile(r"^/k/([^/]+)(?=/|$)")


SERVED = (
    "POST /v1/chat/completions, /v1/responses, /v1/messages and /v1beta/models/NAME:generateContent, and GET /v1/models"
)
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 426: "upgrade_not_supported"}


class Paths:
    """Takes the key out of the path, and forgives a missing or doubled ``/v1``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, key = scope["path"], None
            if (match := KEY_IN_PATH.match(path)) is not None:
                path, key = path[match.end() :], unquote(match.group(1))
            path = "/" + path.strip("/")
            while path.startswith("/v1/v1/"):
                path = path[3:]
            if not VERSIONED.match(path):
                path = f"/v1{path}".rstrip("/")
            scope = {**scope, "path": path, "raw_path": path.encode(), "state": {**scope.get("state", {}), "key": key}}
        await self._app(scope, receive, send)


def keys_in(request: Request) -> Iterator[str]:
    """Every key a request carries, the most specific first: some harnesses insist on a header of their own."""
    bearer = request.headers.get("authorization", "")
    candidates = (
        request.state.key,
        bearer[7:].strip() if bearer[:7].lower() == "bearer " else None,
        request.headers.get("x-api-key"),
        request.headers.get("x-goog-api-key"),
        request.query_params.get("key"),
    )
    return (key for key in candidates if key)


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes, at most ``limit``.

    Raises:
        InvalidRequest: it is larger, encoded, or too slow.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise _plain_error(415, f"Content-Encoding {encoding} is not supported: send the body as it is.")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _plain_error(413, f"The request body is larger than {limit} bytes (gateway.max_body_mb).")
                parts.append(part)
    except TimeoutError:
        raise _plain_error(408, f"The request body did not arrive within {BODY_S:g} s.") from None
    return b"".join(parts)


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        # Decoded here: json takes bytes in other encodings too, and halves of characters.
        body = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _plain_error(400, f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise _plain_error(400, f"The request body is a JSON {type(body).__name__}, expected an object.")
    _check_depth(body)
    return _without_lone_surrogates(body) if b"\\u" in raw else body


def _check_depth(body: Any) -> None:
    inside = [body]
    for _ in range(MOST_NESTED):
        inside = [
            value
            for outer in inside
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(value, dict | list)
        ]
        if not inside:
            return
    raise _too_deep()


def _too_deep() -> CallError:
    return _plain_error(400, f"The request body is nested too deeply: at most {MOST_NESTED} levels are read.")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _without_lone_surrogates(value: Any) -> Any:
    """Harnesses that cut text in the middle of a character send half of it; no tokenizer takes that."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_lone_surrogates(key): _without_lone_surrogates(item) for key, item in value.items()}
    return value


def _plain_error(status: int, message: str) -> CallError:
    error = InvalidRequest(message)
    error.status = status
    return error


def as_call_error(request: Request, error: Exception) -> CallError:
    """What a request failed with, in the terms of ``errors``."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path}"
        shown = _plain_error(error.status_code, f"{where}: {error.detail}. This endpoint serves {SERVED}.")
        shown.code = HTTP_CODES.get(error.status_code, shown.code)
        return shown
    log.error("a request failed", exc_info=error)
    return CallError("The gateway failed on this request; its log says why.")
