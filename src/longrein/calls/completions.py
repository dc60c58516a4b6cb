"""OpenAI's legacy completions: the model goes on from a bare text, without roles and without a chat template."""

import secrets
from collections.abc import Mapping
from typing import Any

from longrein.calls.chat import error_body, head, usage
from longrein.calls.conversation import Conversation, Message
from longrein.calls.dialect import Ask, Delta, Header, Reply, Target, event
from longrein.calls.fields import as_json, count, flag, mapping, refused, text, texts
from longrein.errors import CallError

REFUSED = {
    "suffix": "this model only goes on from a text: leave it out",
    "prompt_embeds": "this model reads text or token ids",
}

MAX_TOKENS = 16
"""Where the request does not say."""


class CompletionsDialect:
    """``POST /v1/completions``."""

    name = "completions"
    overflow_in_stream = False

    def reply_id(self) -> str:
        return f"cmpl-{secrets.token_hex(14)}"

    def read(self, body: Mapping[str, Any], target: Target) -> Ask:
        for field, remedy in REFUSED.items():
            if body.get(field) is not None:
                raise refused(field, body[field], f"not supported; {remedy}")
        for field in ("n", "best_of"):
            if body.get(field) is not None and (isinstance(body[field], bool) or body[field] != 1):
                raise refused(field, body[field], "one choice a call is supported: leave it out, or ask several times")
        if flag(body, "echo"):
            raise refused("echo", True, "the prompt is not repeated: leave it out")
        prompt = _prompt(body.get("prompt"))
        return Ask(
            Conversation((Message("user", prompt if isinstance(prompt, str) else ""),)),
            text(body, "model") or "",
            text=prompt,
            stream=flag(body, "stream"),
            max_tokens=count(body, "max_tokens") or MAX_TOKENS,
            stop=texts(body.get("stop"), "stop"),
            include_usage=flag(mapping(body, "stream_options"), "include_usage", "stream_options"),
            logprobs=_logprobs_wanted(body.get("logprobs")),
            token_ids=flag(body, "return_token_ids"),
        )

    def reply(self, header: Header, ask: Ask, reply: Reply) -> dict[str, Any]:
        choice = _choice(reply.message.content, ask, reply)
        return {**head(header, "text_completion"), "choices": [choice], "usage": usage(reply)}

    def stream(self, header: Header, ask: Ask) -> "CompletionsStream":
        return CompletionsStream(header, ask)

    def error(self, error: CallError) -> tuple[int, dict[str, Any]]:
        return error.status, error_body(error)


class CompletionsStream:
    """Chunks of one reply."""

    content_type = "text/event-stream; charset=utf-8"

    def __init__(self, header: Header, ask: Ask) -> None:
        self._head = head(header, "text_completion")
        self._ask = ask

    def begin(self) -> bytes:
        return b""

    def alive(self) -> bytes:
        return b": keep-alive\n\n"

    def delta(self, delta: Delta) -> bytes:
        choice = {"index": 0, "text": delta.content, "logprobs": None, "finish_reason": None}
        return event(as_json({**self._head, "choices": [choice]}))

    def end(self, reply: Reply) -> bytes:
        events = event(as_json({**self._head, "choices": [_choice("", self._ask, reply)]}))
        if self._ask.include_usage:
            events += event(as_json({**self._head, "choices": [], "usage": usage(reply)}))
        return events + event(b"[DONE]")

    def error(self, error: CallError) -> bytes:
        return event(as_json(error_body(error)))


def _prompt(given: object) -> str | tuple[int, ...]:
    """A text or its token ids; a list of one of them is the same."""
    prompt = given[0] if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list) else given
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        return tuple(prompt)
    raise refused("prompt", given, "expected one text that is not empty, or one list of token ids")


def _logprobs_wanted(given: object) -> bool:
    if given is not None and (isinstance(given, bool) or given != 0):
        raise refused(
            "logprobs", given, "only the sampled tokens' own log-probabilities are available: give 0 to have them"
        )
    return given is not None


def _choice(said: str, ask: Ask, reply: Reply) -> dict[str, Any]:
    """The only choice, with the token ids where they were asked for, placed as vLLM places them."""
    finish_reason = "length" if reply.finish_reason == "length" else "stop"
    choice: dict[str, Any] = {"index": 0, "text": said, "logprobs": _logprobs(reply), "finish_reason": finish_reason}
    if ask.token_ids:
        choice |= {"prompt_token_ids": list(reply.prompt_ids or ()), "token_ids": list(reply.completion_ids or ())}
    return choice


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if reply.tokens is None:
        return None
    offsets, at = [], 0
    for token, _ in reply.tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": [token for token, _ in reply.tokens],
        "token_logprobs": [logprob for _, logprob in reply.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
