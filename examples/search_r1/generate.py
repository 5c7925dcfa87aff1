"""The generate function: queries that the model writes go to the retrieval server, passages go on in the response."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from examples.common.turns import generate_with_tool
from slime.utils.http_utils import post
from slime.utils.types import Sample

PASSAGES = 1
MAX_SEARCHES = 3


async def search(url: str, query: str) -> str:
    """The best passages for a query, as the model sees them."""
    reply = await post(f"{url}/retrieve", {"queries": [query], "topk": PASSAGES})
    return "\n".join(hit["document"]["contents"] for hit in reply["result"][0])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`args.search_url` comes from `--custom-config-path`."""
    tool = partial(search, args.search_url)
    return await generate_with_tool(
        args, sample, sampling_params, tag="search", result_tag="information", tool=tool, max_calls=MAX_SEARCHES
    )


async def exact_match(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 when the last `<answer>` is the label, small words and case aside; 0.1 for an answer in the right form."""
    answers = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    if not answers:
        return 0.0
    return 1.0 if normalize(answers[-1]) == normalize(sample.label) else 0.1


def normalize(text: str) -> str:
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))
