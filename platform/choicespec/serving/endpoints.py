"""The HTTP side: OpenAI's endpoints, health and the page, in front of any models. Knows no Ray."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from choicespec.serving.answers import Event, Finished, Model, Part, Refusal, Refused, Status
from choicespec.serving.openai_api import ChatRequest, CompletionRequest, Json, parse
from choicespec.serving.openai_shapes import Shapes, error_body, model_body
from choicespec.serving.tool_calls import Call, may_be_calls, parse_calls
from choicespec.spec.serving import LimitsSpec

_log = logging.getLogger("ray.serve")
_LOST = Refused(503, "the replica that decoded this request was lost; send it again", "replica_lost")
_NO_STORE = {"Cache-Control": "no-store"}


def digest(token: str) -> str:
    """What is kept of a bearer token."""
    return hashlib.sha256(token.encode()).hexdigest()


def build_api(models: Mapping[str, Model], limits: LimitsSpec, token_digest: str | None) -> FastAPI:
    """The application.

    Args:
        models: by the name that clients use.
        limits: of a request.
        token_digest: of the bearer token that ``/v1`` asks for; None asks for none.
    """
    api = FastAPI(title="choicespec", openapi_url=None)
    gate = _Gate(limits, token_digest)

    @api.get("/v1/models")
    async def list_models(http: Request) -> JSONResponse:
        gate.check_token(http)
        statuses = await asyncio.gather(*(_status(model) for model in models.values()))
        listed = [model_body(name, found) for name, found in zip(models, statuses, strict=True) if found is not None]
        return JSONResponse({"object": "list", "data": listed})

    @api.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = parse(await gate.body(http), ChatRequest)
        return await _complete(_find(models, request.model), request)

    @api.post("/v1/completions")
    async def complete(http: Request) -> Response:
        request = parse(await gate.body(http), CompletionRequest)
        return await _complete(_find(models, request.model), request)

    @api.get("/healthz")
    async def health() -> JSONResponse:
        statuses = await asyncio.gather(*(_status(model) for model in models.values()))
        found = {name: "ok" if status else "unavailable" for name, status in zip(models, statuses, strict=True)}
        refused = {name: status.refused for name, status in zip(models, statuses, strict=True) if status}
        content = {"models": found, "refused_champions": {name: why for name, why in refused.items() if why}}
        return JSONResponse(content, 200 if all(statuses) else 503)

    @api.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(files("choicespec.serving").joinpath("page.html").read_text(encoding="utf-8"))

    @api.exception_handler(Refusal)
    async def refuse(http: Request, error: Refusal) -> JSONResponse:
        return _refusal(error.refused)

    @api.exception_handler(HTTPException)
    async def refuse_path(http: Request, error: HTTPException) -> JSONResponse:
        return _refusal(Refused(error.status_code, f"{http.method} {http.url.path}: {error.detail}"))

    return api


class _Gate:
    """What every request must pass before it is read."""

    def __init__(self, limits: LimitsSpec, token_digest: str | None) -> None:
        self._limits, self._token_digest = limits, token_digest

    def check_token(self, http: Request) -> None:
        """Raises Refusal where the token is missing or wrong; takes the same time for every wrong one."""
        if self._token_digest is None:
            return
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        if not hmac.compare_digest(digest(token), self._token_digest) or scheme.lower() != "bearer":
            message = "missing or wrong bearer token; send the header: Authorization: Bearer TOKEN"
            raise Refusal(Refused(401, message, "invalid_api_key"))

    async def body(self, http: Request) -> bytes:
        """The body; raises Refusal where it is not JSON by its type, which a page of another site cannot send unasked,
        or is too long."""
        self.check_token(http)
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(Refused(415, "send the header: Content-Type: application/json", "unsupported_media_type"))
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > self._limits.body_bytes:
                message = f"the body has more than {self._limits.body_bytes} bytes, the most that is read"
                raise Refusal(Refused(413, message, "request_too_large"))
        return bytes(body)


def _find(models: Mapping[str, Model], name: str) -> Model:
    if name not in models:
        message = f"no model {name!r}; served are: {', '.join(models)}"
        raise Refusal(Refused(404, message, "model_not_found", "model"))
    return models[name]


async def _complete(model: Model, request: ChatRequest | CompletionRequest) -> Response:
    """An answer; a refusal that comes before its first text is an HTTP error, also of a stream."""
    question = request.question()
    shapes = Shapes(request, question.question_id)
    names = frozenset(tool.function.name for tool in request.offered)
    events = _sheltered(model.answer(question))
    first = await anext(events)
    if isinstance(first, Refused):
        return _refusal(first)
    if request.stream:
        return StreamingResponse(_sse(shapes, names, first, events), media_type="text/event-stream", headers=_NO_STORE)
    text, last = _text(first), first
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Refused):
                return _refusal(event)
            text, last = text + _text(event), event
    assert isinstance(last, Finished), "an answer ends with one"
    return JSONResponse(shapes.whole(text, parse_calls(text, names), last))


async def _sse(
    shapes: Shapes, names: Collection[str], first: Part | Finished, events: AsyncGenerator[Event, None]
) -> AsyncIterator[bytes]:
    """Chunks as server-sent events. A client that goes away ends the decoding."""
    answer = _Told(names)
    async with aclosing(events):
        for chunk in [*shapes.opening(), *_chunks(shapes, answer, first)]:
            yield _event(chunk)
        async for event in events:
            if isinstance(event, Refused):
                yield _event(error_body(event))
                return
            for chunk in _chunks(shapes, answer, event):
                yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _chunks(shapes: Shapes, answer: "_Told", event: Part | Finished) -> list[Json]:
    if isinstance(event, Part):
        return shapes.part(answer.add(event), event)
    text, calls = answer.end(event)
    return [*shapes.part(text, event), *shapes.ending(calls, event)]


class _Told:
    """What a stream has told of an answer; what may turn out to be calls is held back until that is known.

    Args:
        names: of the functions on offer.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text, self._told = "", 0

    def add(self, event: Part | Finished) -> str:
        """What can be told now."""
        self._text += _text(event)
        return "" if self._names and may_be_calls(self._text) else self._rest()

    def end(self, event: Finished) -> tuple[str, tuple[Call, ...]]:
        """The rest as text, or the calls that the whole answer is."""
        text = self.add(event)
        calls = parse_calls(self._text, self._names) if self._told == 0 else ()
        return ("" if calls else text + self._rest()), calls

    def _rest(self) -> str:
        rest = self._text[self._told :]
        self._told = len(self._text)
        return rest


async def _sheltered(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The same events; a replica that fails or dies is a clean refusal, and the kind of failure is logged."""
    event: Event | None = None
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        _log.error("answer lost: %s", type(error).__name__)
    if not isinstance(event, Finished | Refused):
        yield _LOST


async def _status(model: Model) -> Status | None:
    try:
        return await model.status()
    except Exception as error:
        _log.warning("no status: %s", type(error).__name__)
        return None


def _text(event: Part | Finished) -> str:
    return "".join(piece.text for piece in event.pieces)


def _refusal(refused: Refused) -> JSONResponse:
    headers = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
    return JSONResponse(error_body(refused), refused.status, headers)


def _event(chunk: Json) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
