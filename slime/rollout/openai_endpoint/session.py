"""One agent's conversations as token-exact samples.

A request whose messages continue an earlier turn gets that turn's tokens, followed by the tokens of the new messages
alone: what was generated is never tokenised again. A request that rewrites history (a chat template that drops old
reasoning, an agent that shortens its context, a second agent) starts another sample of the same trajectory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from slime.rollout.errors import RolloutError
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate
from slime.utils.types import Sample

KEPT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Interrupted(RolloutError):
    """The rollout is full: the agent's request is not answered any more."""


@dataclass
class Turn:
    """What a request is answered with."""

    message: dict[str, Any]
    finish_reason: str
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]


@dataclass
class _Thread:
    """A run of requests each of which continues the one before: one sample."""

    sample: Sample
    messages: list[dict[str, Any]]
    """Up to the last answer."""
    rendered: str
    """The template's rendering of `messages`, without a generation prompt."""
    tools: list[dict[str, Any]] | None
    turns: int = 0


class ChatSession:
    """The conversations of one sample.

    Args:
        sample: the prompt's sample; its label and metadata go to all samples.
        sampling_params: of the rollout; an answer has at most their `max_new_tokens`.
    """

    def __init__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> None:
        self.args = args
        self.sample = sample
        self.sampling_params = sampling_params
        self.base_url = ""
        self.threads: list[_Thread] = []
        self.interrupted = False
        self.tokenizer = GenerateState(args).tokenizer

    # -- a request ----------------------------------------------------------------------------------------------------

    async def complete(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> Turn:
        """Generate the next assistant message.

        Raises:
            Interrupted: the rollout has ended.
            RolloutError: the engine refused the request.
        """
        messages = [_plain(message) for message in messages]
        thread = self._continued(messages, tools) or self._new_thread(messages, tools)
        sample = thread.sample
        prompt_ids = list(sample.tokens)
        start = sample.response_length
        await self._generate(sample, max_tokens, stop)
        thread.turns += 1
        sample.metadata["round_number"] = thread.turns
        token_ids = sample.tokens[len(prompt_ids) :]
        message = self._message(token_ids)
        thread.messages = [*messages, message]
        thread.rendered = self._render(thread.messages, tools)
        reason = "length" if sample.truncated else "tool_calls" if message.get("tool_calls") else "stop"
        return Turn(message, reason, prompt_ids, token_ids, sample.rollout_log_probs[start:])

    async def _generate(self, sample: Sample, max_tokens: int | None, stop: list[str] | None) -> None:
        limit = self.sampling_params["max_new_tokens"]
        limit = limit if max_tokens is None else min(limit, max_tokens)
        params = {**self.sampling_params, "max_new_tokens": sample.response_length + limit}
        if stop:
            params["stop"] = [*(params.get("stop") or []), *stop]
        sample.status = Sample.Status.PENDING
        while sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED):
            if GenerateState(self.args).aborted:
                self.interrupted = True
                raise Interrupted("the rollout has ended")
            await generate(self.args, sample, params)

    def _new_thread(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> _Thread:
        sample = self.sample.clone()
        sample.prompt = messages
        text = self._render(messages, tools, add_generation_prompt=True)
        sample.tokens = self.tokenizer.encode(text, add_special_tokens=False)
        sample.response, sample.response_length, sample.rollout_log_probs, sample.loss_mask = "", 0, [], []
        thread = _Thread(sample, [], "", tools)
        self.threads.append(thread)
        return thread

    def _continued(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> _Thread | None:
        """The thread that these messages continue, extended by their new part; None when they continue none."""
        for thread in reversed(self.threads):
            known = len(thread.messages)
            if not 0 < known < len(messages) or messages[:known] != thread.messages or tools != thread.tools:
                continue
            text = self._render(messages, tools, add_generation_prompt=True)
            if text.startswith(thread.rendered):
                self._append(thread, text[len(thread.rendered) :])
                return thread
        return None

    def _append(self, thread: _Thread, new_text: str) -> None:
        """Tokens that no model generated: what the template writes after the answer, and the new messages."""
        sample, end = thread.sample, self.tokenizer.eos_token or ""
        head, separator, tail = thread.rendered.rpartition(end) if end else (thread.rendered, "", "")
        ended = bool(sample.tokens) and sample.tokens[-1] == self.tokenizer.eos_token_id
        text = (tail if ended or not head else separator + tail) + new_text
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        sample.append_response_tokens(self.args, tokens=tokens, trainable=False, text=text)

    def _render(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.args.apply_chat_template_kwargs,
        )

    def _message(self, token_ids: list[int]) -> dict[str, Any]:
        ids = token_ids[:-1] if token_ids and token_ids[-1] == self.tokenizer.eos_token_id else token_ids
        text = self.tokenizer.decode(ids)
        calls = parse_tool_calls(text)
        if not calls:
            return {"role": "assistant", "content": text}
        content = text[: text.index("<tool_call>")].rstrip()
        return {"role": "assistant", "content": content, "tool_calls": calls}

    # -- the result ---------------------------------------------------------------------------------------------------

    def samples(self) -> Sample | list[Sample]:
        """What the agent's conversations were: one sample, or several pieces of one trajectory.

        An interrupted sample starts again in another rollout: nobody knows how to continue the agent.

        Raises:
            RolloutError: the agent has asked for nothing.
        """
        if self.interrupted:
            self.sample.status = Sample.Status.ABORTED
            return self.sample
        if not self.threads:
            raise RolloutError(f"the agent of sample {self.sample.index} has sent no request to {self.base_url}")
        pieces = [thread.sample for thread in self.threads]
        return pieces if len(pieces) > 1 else pieces[0]


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen) as OpenAI tool calls."""
    calls = []
    for number, found in enumerate(_TOOL_CALL.finditer(text)):
        try:
            call = json.loads(found.group(1))
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = call.get("arguments", {})
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return calls


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The parts of a message that a template reads; text parts joined to a text."""
    kept = {key: message[key] for key in KEPT_KEYS if message.get(key) is not None}
    content = kept.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        kept["content"] = "".join(part["text"] for part in content)
    kept.setdefault("content", "")
    return kept
