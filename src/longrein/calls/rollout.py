"""The calls of one open rollout: admitted, sampled, recorded, delivered.

A call is recorded, durably, before the last byte of its reply is sent; if no client received it, the record is
corrected. A client that hangs up ends the sampling, and what was sampled by then is kept as an orphan.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from longrein.calls.admission import Allowance, Passage
from longrein.calls.answer import Answer
from longrein.calls.conversation import Conversation, Message, calls_are_valid, results_failed
from longrein.calls.dialect import Ask, Dialect, Header, Reply, Target
from longrein.calls.fields import refused
from longrein.calls.reply import GrowingReply
from longrein.calls.roles import RoleReader
from longrein.calls.services import Services
from longrein.calls.sessions import Opening, Sessions
from longrein.calls.texts import Texts
from longrein.engines.engine import SampleChunk, SampleRequest
from longrein.errors import (
    CallError,
    CapExceeded,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    LedgerError,
    Overloaded,
    UnknownKey,
)
from longrein.records import Call, RoleArray
from longrein.waits import waiting

log = logging.getLogger(__name__)

STALL_S = 900.0
"""Longest silence of the engine within one call."""

RECORD_S = 60.0
"""Longest time a call may take to become durable."""


@dataclass(frozen=True, slots=True)
class RolloutUse:
    """What a rollout used.

    Attributes:
        calls: model calls answered.
        tokens: tokens sampled, those of orphans included.
        cap_hit: the cap that refused a call, in words; None if none did.
        engine_error: the first failure on our side of the endpoint, if any.
        refusal: the last request that was refused for what it asked, if any: status and message.
    """

    calls: int = 0
    tokens: int = 0
    cap_hit: str | None = None
    engine_error: str | None = None
    refusal: str | None = None


class OpenRollout:
    """A rollout whose key opens the endpoint."""

    def __init__(self, rollout_id: str, services: Services, temperature: float, seed: int | None) -> None:
        self.rollout_id = rollout_id
        self._services = services
        self._temperature = temperature
        self._seed = seed
        self._sessions = Sessions(services.renderer)
        self._texts = Texts(services.renderer)
        self._role_reader = RoleReader(services.renderer)
        self._roles_missed = False
        self._allowance = Allowance(services.config)
        self._answers: dict[bytes, Answer] = {}
        self._reading: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._by_reply: dict[str, tuple[str, bool]] = {}
        self._index = 0
        self._answered = 0
        self._failure: str | None = None
        self._refusal: str | None = None
        self._closed = False

    @property
    def use(self) -> RolloutUse:
        hit = self._allowance.hit or None
        return RolloutUse(self._answered, self._allowance.tokens, hit, self._failure, self._refusal)

    def note_refusal(self, error: CallError) -> None:
        """Keep what a request was refused with, to be told should no other be answered."""
        if not isinstance(error, Overloaded):
            self._refusal = f"{error.status}: {error.message}"

    def reading(self, digest: bytes) -> asyncio.Lock:
        """Held while a request is read, so that the same one, coming meanwhile, finds the answer to join."""
        return self._reading.setdefault(digest, asyncio.Lock())

    def join(self, digest: bytes) -> Answer | None:
        """The answer to the same request, under way or not delivered yet, if there is one.

        Whoever is given an answer, here or by ``admit``, must ``leave`` it.

        Raises:
            UnknownKey: the rollout has ended.
        """
        self._check_open()
        answer = self._answers.get(digest)
        if answer is not None:
            answer.followers += 1
        return answer

    async def admit(
        self, ask: Ask, dialect: Dialect, body: Mapping[str, Any], digest: bytes, target: Target, size: int
    ) -> Answer:
        """The answer to a new request.

        Args:
            size: of the request, in bytes.

        Raises:
            CallError: the request is refused, in one of the ways ``errors`` lists.
        """
        ask = self._whole_conversation(ask)
        opening = await self._services.beside.run(size, lambda: self._opening(ask))
        self._check_open()
        answer = self._begin(ask, opening, dialect, body, digest, target)
        answer.followers += 1
        return answer

    async def count(self, conversation: Conversation, size: int) -> int:
        """Prompt tokens of a conversation, as a call would begin; nothing is sampled or recorded.

        Raises:
            InvalidRequest: the model's template cannot show it.
            CapExceeded: the rollout has counted as often as it may.
        """
        self._check_open()
        self._allowance.take_count()
        return len((await self._services.beside.run(size, lambda: self._sessions.open(conversation))).prompt.ids)

    def _check_open(self) -> None:
        if self._closed:
            raise UnknownKey("This rollout has ended.")

    def _opening(self, ask: Ask) -> Opening:
        return self._sessions.open(ask.conversation) if ask.text is None else self._texts.open(ask.text)

    def header(self, ask: Ask, dialect: Dialect) -> Header:
        """A new reply's."""
        return Header(dialect.reply_id(), int(time.time()), ask.model or self._services.config.model_name)

    def _begin(
        self,
        ask: Ask,
        opening: Opening,
        dialect: Dialect,
        body: Mapping[str, Any],
        digest: bytes,
        target: Target,
    ) -> Answer:
        limit = self._services.engine.context_length
        room = limit - len(opening.prompt.ids)
        if room < 1:
            raise ContextLengthExceeded(len(opening.prompt.ids), limit)
        limits = [room, self._services.sampling.max_tokens, *([] if ask.max_tokens is None else [ask.max_tokens])]
        self._services.queue.enter()
        try:
            granted = self._allowance.take(min(limits))
        except (CapExceeded, Overloaded):
            self._services.queue.leave()
            raise
        index, self._index = self._index, self._index + 1
        agent = self._services.agents.of(ask.conversation, ask.model, target.headers)
        request = SampleRequest(
            opening.prompt.ids,
            granted,
            temperature=self._temperature,
            top_p=self._services.sampling.top_p,
            top_k=self._services.sampling.top_k,
            stop_ids=self._services.renderer.stop_ids,
            seed=None if self._seed is None else _seed(self._seed, index),
            policy=agent.policy,
        )
        header = self.header(ask, dialect)
        answer = Answer(f"call-{secrets.token_hex(12)}", index, digest, ask, agent, header, opening, request)
        # Only the last undelivered reply may be asked for again: what comes now goes on without the earlier ones.
        self._answers = {key: old for key, old in self._answers.items() if not old.undelivered}
        self._answers[digest] = answer
        task = asyncio.create_task(self._answer(answer, dialect, body))
        self._tasks[answer.call_id] = task
        task.add_done_callback(lambda done: self._ended(answer, done))
        return answer

    def _whole_conversation(self, ask: Ask) -> Ask:
        """With what the request refers to: the conversation of an earlier reply, and its own instructions in front."""
        messages = ask.conversation.messages
        if ask.previous is not None:
            messages = (*self._conversation_after(ask.previous), *messages)
        if ask.instructions is not None:
            messages = (Message("system", ask.instructions), *messages)
        return replace(ask, conversation=replace(ask.conversation, messages=messages))

    def _conversation_after(self, reply_id: str) -> tuple[Message, ...]:
        call_id, instructed = self._by_reply.get(reply_id, ("", False))
        messages = self._sessions.messages_of(call_id)
        if messages is None:
            raise refused(
                "previous_response_id", reply_id, "no reply with this id was delivered in this rollout: send all turns"
            )
        return messages[1:] if instructed else messages

    async def _answer(self, answer: Answer, dialect: Dialect, body: Mapping[str, Any]) -> None:
        started = time.time()
        try:
            reply = await self._sampled(answer)
            answer.kept = True
            call = self._call(answer, dialect, body, reply, started)
            await self._record(call)
        except asyncio.CancelledError:
            await self._record_orphan(answer, dialect, body, started)
            raise
        except (EngineError, LedgerError, DeadlineExceeded) as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            await self._record_orphan(answer, dialect, body, started)
            answer.fail(CallError(f"The model could not answer: {error}"))
            return
        self._answered += 1
        self._remember(answer, reply)
        answer.complete(reply)
        if answer.followers == 0:
            await self._mark_undelivered(answer)

    async def _sampled(self, answer: Answer) -> Reply:
        """Sample to the end, telling followers of what grows; behind the gate again where it was cut."""
        ask, sample = answer.ask, answer.sample
        growing = GrowingReply(
            self._services.renderer,
            answer.opening.prompt.ids.tolist(),
            ask.conversation.tools,
            ask.stop,
            live=ask.stream,
            plain=ask.text is not None,
        )
        ended, part = False, 0
        while not ended:
            name = f"{self.rollout_id} call {answer.index}"
            async with self._services.gate.passing(name) as passage, waiting(f"the engine, by {name}", None):
                ended = await self._sample(answer, growing, passage, part)
            part += 1
        if growing.cut:
            sample.finish_reason = "stop"
            answer.whole = False
        elif not sample.finish_reason:
            raise EngineError("the engine ended a sample without saying why")
        message, rest = growing.finish()
        answer.publish(rest)
        finish_reason = "tool_calls" if message.tool_calls and sample.finish_reason == "stop" else sample.finish_reason
        tokens = None
        if ask.logprobs:
            texts = (self._services.renderer.decode([i]) for i in sample.ids)
            tokens = tuple(zip(texts, sample.logprobs, strict=True))
        return Reply(
            message,
            finish_reason,
            len(answer.opening.prompt.ids),
            len(sample.ids),
            stop=growing.stopped_by,
            tokens=tokens,
            prompt_ids=tuple(answer.opening.prompt.ids.tolist()) if ask.token_ids else None,
            completion_ids=tuple(sample.ids) if ask.token_ids else None,
        )

    async def _sample(self, answer: Answer, growing: GrowingReply, passage: Passage, part: int) -> bool:
        """Sample on from what there is; False where ``passage`` was cut before the end."""
        sample, loop = answer.sample, asyncio.get_running_loop()
        chunks = self._services.engine.sample(self._request(answer, part))
        try:
            async with asyncio.timeout(STALL_S) as silence:
                passage.when_cut = lambda: silence.reschedule(loop.time())
                async for chunk in chunks:
                    sample.take(chunk)
                    answer.publish(growing.grow(chunk.ids))
                    if growing.cut or chunk.finish_reason is not None:
                        return True
                    if passage.is_cut:
                        return False
                    silence.reschedule(loop.time() + STALL_S)
                return True
        except TimeoutError:
            if passage.is_cut:
                return False
            raise EngineError(f"the engine gave no token for {STALL_S:g} s") from None
        finally:
            passage.when_cut = lambda: None
            await _close(chunks)

    def _request(self, answer: Answer, part: int) -> SampleRequest:
        """The call's request, or what is left of it where it was cut."""
        request = answer.request
        if not part:
            return request
        told = np.asarray(answer.sample.ids, dtype=np.int32)
        return replace(
            request,
            prompt_ids=np.concatenate([request.prompt_ids, told]),
            max_tokens=request.max_tokens - len(told),
            seed=None if request.seed is None else _seed(request.seed, part),
        )

    def _call(
        self, answer: Answer, dialect: Dialect, body: Mapping[str, Any], reply: Reply | None, started: float
    ) -> Call:
        sample = answer.sample
        return Call(
            call_id=answer.call_id,
            rollout_id=self.rollout_id,
            index=answer.index,
            agent=answer.agent.name,
            dialect=dialect.name,
            request=body,
            reply={} if reply is None else dialect.reply(answer.header, answer.ask, reply),
            prompt_ids=answer.opening.prompt.ids,
            completion_ids=np.asarray(sample.ids, dtype=np.int32),
            logprobs=np.asarray(sample.logprobs, dtype=np.float32),
            versions=np.asarray(sample.versions, dtype=np.int32),
            temperature=self._temperature,
            policy=answer.request.policy,
            finish_reason="cancelled" if reply is None else reply.finish_reason,
            cause=answer.opening.cause,
            train=answer.agent.train,
            parent_id=answer.opening.parent_id,
            inherited=answer.opening.inherited,
            delivered=reply is not None,
            started_at=started,
            ended_at=time.time(),
            roles=None if reply is None else self._roles(answer, reply.message),
            tools_valid=None if reply is None else calls_are_valid(reply.message, answer.ask.conversation.tools),
            tools_failed=results_failed(answer.ask.conversation.messages),
        )

    def _roles(self, answer: Answer, message: Message) -> RoleArray | None:
        """Of the tokens of a reply with tool calls, where they can be told."""
        if not message.tool_calls:
            return None
        prompt_ids, tools = answer.opening.prompt.ids.tolist(), answer.ask.conversation.tools
        reading = self._role_reader.read(answer.sample.ids, prompt_ids, tools, message.tool_calls)
        if not reading.unknown:
            return reading.roles
        if not self._roles_missed:
            self._roles_missed = True
            log.warning(
                "%s, from call %d on: no roles are recorded of tool calls' tokens where they cannot be told: %s",
                self.rollout_id,
                answer.index,
                reading.unknown,
            )
        return None

    async def _record(self, call: Call) -> None:
        async with waiting(f"call {call.index} of {self.rollout_id} to be recorded", RECORD_S):
            await self._services.recorder.record(call)

    async def _record_orphan(self, answer: Answer, dialect: Dialect, body: Mapping[str, Any], started: float) -> None:
        """Keep what was sampled for nobody; a call that had sampled nothing leaves no trace."""
        if answer.kept or not answer.sample.ids:
            return
        orphan = self._call(answer, dialect, body, None, started)
        with suppress(LedgerError, DeadlineExceeded):
            await self._record(orphan)

    def _ended(self, answer: Answer, task: "asyncio.Task[None]") -> None:
        del self._tasks[answer.call_id]
        self._allowance.give_back(answer.request.max_tokens, len(answer.sample.ids))
        self._services.queue.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("model call %s of %s failed", answer.call_id, self.rollout_id, exc_info=error)
            self._failure = self._failure or f"{type(error).__name__}: {error}"
        if not answer.ended:
            answer.fail(CallError("The call was ended before it was answered."))
        if answer.error is not None and self._answers.get(answer.digest) is answer:
            del self._answers[answer.digest]

    # ---- delivery

    async def leave(self, answer: Answer, *, delivered: bool) -> None:
        """A follower is done with an answer; ``delivered`` says whether all of it was sent."""
        answer.followers -= 1
        if delivered:
            await self._mark_delivered(answer)
        elif answer.followers == 0 and not answer.delivered:
            if not answer.kept and (task := self._tasks.get(answer.call_id)) is not None:
                # A retry must not join what is being ended.
                self._forget(answer)
                task.cancel()
            elif answer.reply is not None:
                await self._mark_undelivered(answer)

    async def _mark_delivered(self, answer: Answer) -> None:
        answer.delivered = True
        self._forget(answer)
        if answer.undelivered and answer.reply is not None:
            answer.undelivered = False
            self._remember(answer, answer.reply)
            await self._services.recorder.deliver(answer.call_id, True)

    async def _mark_undelivered(self, answer: Answer) -> None:
        if not answer.undelivered:
            answer.undelivered = True
            self._sessions.forget(answer.call_id)
            self._texts.forget(answer.call_id)
            await self._services.recorder.deliver(answer.call_id, False)

    def _remember(self, answer: Answer, reply: Reply) -> None:
        ids = np.asarray(answer.sample.ids, dtype=np.int32)
        if answer.ask.text is None:
            self._sessions.add(answer.call_id, answer.opening, reply.message, ids, whole=answer.whole)
        else:
            self._texts.add(answer.call_id, answer.opening, reply.message.content, ids, whole=answer.whole)
        self._by_reply[answer.header.reply_id] = (answer.call_id, answer.ask.instructions is not None)

    def _forget(self, answer: Answer) -> None:
        if self._answers.get(answer.digest) is answer:
            del self._answers[answer.digest]

    async def close(self) -> RolloutUse:
        """End every call; none is admitted any more."""
        self._closed = True
        tasks = list(self._tasks.values())
        for answer in self._answers.values():
            if not answer.kept and (task := self._tasks.get(answer.call_id)) is not None:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=RECORD_S)
        return self.use


async def _close(chunks: AsyncIterator[SampleChunk]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


def _seed(seed: int, index: int) -> int:
    """Each call of a rollout samples its own stream, and each part of a call that was cut; always the same one."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:6], "big")
