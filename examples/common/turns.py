"""A response in which the model calls a tool in its own text: `<tag>...</tag>`, the result, and on."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample

Tool = Callable[[str], Awaitable[str]]


async def generate_with_tool(
    args: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    tag: str,
    result_tag: str,
    tool: Tool,
    max_calls: int,
) -> Sample:
    """Generate until the model ends its turn; each `<tag>text</tag>` is answered with a line
    `<result_tag>...</result_tag>` (lines, so that tokens do not run across the tags).

    The result's tokens are appended untrained, everything else is kept as it was generated. A sample that is aborted
    keeps its tokens and continues here in another rollout.
    """
    params = {**sampling_params, "stop": [*(sampling_params.get("stop") or []), f"</{tag}>"]}
    encode = GenerateState(args).tokenizer.encode
    while True:
        sample = await generate(args, sample, params)
        if sample.status is not Sample.Status.COMPLETED:
            break
        call, opening = open_call(sample.response, tag, result_tag)
        if call is None or sample.metadata.get("tool_calls", 0) >= max_calls:
            break
        started = time.perf_counter()
        text = f"{opening}{await tool(call)}</{result_tag}>\n"
        sample.non_generation_time += time.perf_counter() - started
        tokens = encode(text, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=text)
        sample.metadata["tool_calls"] = sample.metadata.get("tool_calls", 0) + 1
        sample.status = Sample.Status.PENDING
    sample.metadata["round_number"] = 1 + sample.metadata.get("tool_calls", 0)
    return sample


def open_call(response: str, tag: str, result_tag: str) -> tuple[str | None, str]:
    """The text of the call that the response ends with, None when it ends otherwise; and the opening of the result
    that belongs after it: less than a line with `<result_tag>` where the token that ended the call holds some of it
    (`>` and `<` are often one token)."""
    last = response.rpartition(f"</{result_tag}>")[2]
    before, closed, after = last.rpartition(f"</{tag}>")
    _, opened, text = before.rpartition(f"<{tag}>")
    for opening in (f"\n<{result_tag}>", f"<{result_tag}>"):
        if opened and closed and opening.startswith(after):
            return text, opening[len(after) :]
    return None, ""
