"""The reward of DAPO (arXiv:2503.14476): the answer after the last "Answer:" of the response's end, +1 or -1."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.math_answers import cheap_equal, last_boxed, normalize

TAIL = 300
"""Characters at the end of a response in which the answer must stand."""
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def compute_dapo_reward(response: str, label: str) -> dict[str, Any]:
    """`{"score": 1.0 or -1.0, "acc": bool, "pred": the answer found}`; use `--reward-key score`."""
    found = _ANSWER.findall(response[-TAIL:])
    answer = found[-1].strip() if found else None
    if answer is not None and "\\boxed" in answer:
        answer = last_boxed(answer) or answer
    correct = answer is not None and _same(answer, label)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer if answer is not None else "[INVALID]"}


def _same(answer: str, label: str) -> bool:
    truth = last_boxed(label) or label
    equal = cheap_equal(truth, answer)
    return normalize(answer) == normalize(truth) if equal is None else equal
