"""A reward for one of the data sets."""

import re


async def has_answer_line(args, sample, **kwargs) -> float:
    """1 when the response ends with `#### number`."""
    return float(re.search(r"####\s*-?\d+\s*(<\|im_end\|>)?\s*$", sample.response) is not None)
