"""The generate function: code that the model writes is run in the sandbox, what it prints goes on in the response."""

from __future__ import annotations

from typing import Any

from examples.common.turns import generate_with_tool
from examples.retool.sandbox import Limits, run_python
from slime.utils.types import Sample

MAX_CALLS = 4
OUTPUT_CHARACTERS = 256


async def run_code(code: str) -> str:
    """Output of the code, as the model sees it."""
    result = await run_python(code, Limits())
    text = result.output.strip()[:OUTPUT_CHARACTERS]
    return text if result.status in ("ok", "error") else f"{text}[{result.status}]"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate_with_tool(
        args, sample, sampling_params, tag="code", result_tag="output", tool=run_code, max_calls=MAX_CALLS
    )
