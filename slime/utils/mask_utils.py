"""Loss masks for multi-turn SFT: which tokens of a rendered conversation the assistant produced.

The conversation is rendered as a whole by the model's own chat template, so the tokens are the ones that the model
meets at inference, and the assistant's turns are found in it.
"""

from __future__ import annotations

import re
from typing import Any

STYLES = ("qwen", "qwen3", "distill_qwen")
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_HEADER = re.compile(re.escape(TURN_START) + r"\s*assistant\s")
_PROBE = [{"role": "user", "content": "x"}]


class MultiTurnLossMaskGenerator:
    """Tokens and loss mask of a message list.

    `qwen` and `qwen3` are ChatML templates: the mask is 1 from the end of the generation prompt through `<|im_end|>`
    of every assistant turn. (qwen3 drops the reasoning of earlier turns and writes an empty one into the last; the
    mask is of what it renders.) `distill_qwen` (DeepSeek-R1-Distill) trains on the last assistant message only, whose
    reasoning its template would remove. A message with `"step_loss_mask": 0` is not trained on.
    """

    def __init__(self, tokenizer, tokenizer_type: str = "qwen", template_kwargs: dict[str, Any] | None = None) -> None:
        if tokenizer_type not in STYLES:
            raise ValueError(f"--loss-mask-type {tokenizer_type!r} is unknown; use one of {', '.join(STYLES)}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self.template_kwargs = template_kwargs or {}

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """(token ids of the conversation, 0/1 per token).

        Raises:
            ValueError: no assistant message, or the turns cannot be told apart.
        """
        if not any(message.get("role") == "assistant" for message in messages):
            raise ValueError("a conversation without an assistant message has nothing to train on")
        if self.tokenizer_type == "distill_qwen":
            return self._last_message(messages, tools)
        return self._chatml(messages, tools)

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Tokens from the first trained one to the end, per conversation."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: list[int], loss_mask: list[int]) -> list[str]:
        """The trained stretches as text."""
        texts, stretch = [], []
        for token, keep in zip(token_ids, loss_mask, strict=True):
            if keep:
                stretch.append(token)
            elif stretch:
                texts.append(self.tokenizer.decode(stretch))
                stretch = []
        return [*texts, self.tokenizer.decode(stretch)] if stretch else texts

    def _render(self, messages: list[dict[str, Any]], tools=None, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.template_kwargs,
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _chatml(self, messages: list[dict[str, Any]], tools) -> tuple[list[int], list[int]]:
        text = self._render(messages, tools)
        turns = [message for message in messages if message.get("role") == "assistant"]
        spans = self._assistant_spans(text)
        if len(spans) != len(turns):
            raise ValueError(
                f"the conversation has {len(turns)} assistant messages, its rendering {len(spans)} assistant turns: "
                f"the template is not of type {self.tokenizer_type} (--loss-mask-type), or a text holds {TURN_START}"
            )
        kept = [span for span, turn in zip(spans, turns, strict=True) if turn.get("step_loss_mask", 1) == 1]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [0] * len(encoded["input_ids"])
        position = 0
        for i, (start, end) in enumerate(encoded["offset_mapping"]):
            while position < len(kept) and start >= kept[position][1]:
                position += 1
            mask[i] = int(
                position < len(kept) and kept[position][0] <= start and end <= kept[position][1] and end > start
            )
        return encoded["input_ids"], mask

    def _assistant_spans(self, text: str) -> list[tuple[int, int]]:
        """[start, end) in the rendering of what the model generated in each assistant turn, end of turn included."""
        generation_prompt = self._generation_prompt()
        header = _HEADER.match(generation_prompt)
        spans = []
        for found in _HEADER.finditer(text) if header else ():
            if text.startswith(generation_prompt, found.start()):
                start = found.start() + len(generation_prompt)
            else:
                start = found.start() + len(header.group(0))
            end = text.find(TURN_END, start)
            if end < 0:
                raise ValueError(f"the chat template does not close an assistant turn with {TURN_END}")
            spans.append((start, end + len(TURN_END)))
        return spans

    def _generation_prompt(self) -> str:
        without = self._render(_PROBE)
        with_prompt = self._render(_PROBE, add_generation_prompt=True)
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _last_message(self, messages: list[dict[str, Any]], tools) -> tuple[list[int], list[int]]:
        if messages[-1].get("role") != "assistant":
            raise ValueError("distill_qwen trains on the last message, which must be the assistant's")
        prompt = self._render(messages[:-1], tools, add_generation_prompt=True)
        response = messages[-1]["content"]
        opening = "<think>\n"
        if prompt.endswith(opening) and response.startswith(opening):
            response = response[len(opening) :]
        prompt_ids = self._encode(prompt)
        response_ids = [*self._encode(response), self.tokenizer.eos_token_id]
        keep = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt_ids + response_ids, [0] * len(prompt_ids) + [keep] * len(response_ids)
