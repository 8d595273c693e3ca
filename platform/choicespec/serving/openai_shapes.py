"""OpenAI's chat completions and completions: the shapes of what comes back."""

import secrets
from collections.abc import Sequence
from time import time

from choicespec.records import FinishReason
from choicespec.serving.answers import Finished, Part, Progress, Refused, Status
from choicespec.serving.openai_api import ChatRequest, CompletionRequest, Json
from choicespec.serving.text import Piece
from choicespec.serving.tool_calls import Call

_FINISH: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length"}
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(refused: Refused) -> Json:
    """The API's error shape."""
    kind = _ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def model_body(name: str, status: Status) -> Json:
    """An entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "choicespec", "choicespec": status._asdict()}


class Shapes:
    """The bodies of one answer.

    Args:
        asked: the request.
        question_id: the answer's id.
    """

    def __init__(self, asked: ChatRequest | CompletionRequest, question_id: str) -> None:
        self._asked, self._chat = asked, isinstance(asked, ChatRequest)
        self._usage_asked = asked.stream_options is not None and asked.stream_options.include_usage
        self._common = {"id": question_id, "created": int(time()), "model": asked.model}

    def whole(self, text: str, calls: Sequence[Call], finished: Finished) -> Json:
        """The one body of an answer that is not streamed."""
        if self._chat:
            message: Json = {"role": "assistant", "content": None if calls else text}
            if calls:
                message["tool_calls"] = _made(calls)
            choice: Json = {"message": message}
        else:
            choice = {"text": text}
        choice |= {"index": 0, "logprobs": None, "finish_reason": _reason(finished, calls)}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": [choice], "usage": self._usage(finished)}

    def opening(self) -> list[Json]:
        """The first chunk of a stream of a conversation says who speaks."""
        return [self._chunk([self._choice({"role": "assistant", "content": ""})])] if self._chat else []

    def part(self, text: str, event: Part | Finished) -> list[Json]:
        """The chunk of a block; none where it adds nothing that was asked for."""
        if not text and not self._asked.choicespec.blocks:
            return []
        chunk = self._chunk([self._choice({"content": text} if self._chat else {"text": text})])
        if self._asked.choicespec.blocks:
            chunk["choicespec"] = _block(event.pieces, event.progress)
        return [chunk]

    def ending(self, calls: Sequence[Call], finished: Finished) -> list[Json]:
        """The last chunks: calls, the reason, and usage where it is asked for."""
        chunks = []
        if calls:
            delta = [{"index": index, **call} for index, call in enumerate(_made(calls))]
            chunks.append(self._chunk([self._choice({"tool_calls": delta})]))
        chunks.append(self._chunk([self._choice({} if self._chat else {"text": ""}, _reason(finished, calls))]))
        if self._usage_asked:
            chunks.append({**self._chunk([]), "usage": self._usage(finished)})
        return chunks

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices}

    def _choice(self, content: Json, reason: str | None = None) -> Json:
        return {"index": 0, "logprobs": None, "finish_reason": reason} | ({"delta": content} if self._chat else content)

    def _usage(self, finished: Finished) -> Json:
        progress = finished.progress
        usage: Json = {
            "prompt_tokens": progress.prompt_tokens,
            "completion_tokens": progress.output_tokens,
            "total_tokens": progress.prompt_tokens + progress.output_tokens,
        }
        if self._asked.choicespec.usage:
            usage["choicespec"] = {
                "method": finished.method,
                "version": finished.version,
                "steps": progress.steps,
                "drafted_steps": progress.drafted_steps,
                "accepted_per_step": progress.accepted / progress.steps if progress.steps else 0.0,
                "decode_tokens_per_s": progress.decode_tokens / progress.decode_ms * 1e3 if progress.decode_ms else 0.0,
            }
        return usage


def _block(pieces: Sequence[Piece], progress: Progress) -> Json:
    return {"pieces": [piece._asdict() for piece in pieces], "progress": progress._asdict()}


def _made(calls: Sequence[Call]) -> list[Json]:
    return [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call._asdict()} for call in calls]


def _reason(finished: Finished, calls: Sequence[Call]) -> str:
    return "tool_calls" if calls else _FINISH[finished.finish_reason]
