"""Verifiable instructions (`--rm-type ifbench`): does a response do what each instruction of its prompt asks?

The instructions are those of IFBench (Pyatkin et al., "Generalizing Verifiable Instruction Following",
arXiv:2507.02833). The checks are written from the wording of the instructions, so single verdicts can differ from the
benchmark's own code where the wording leaves room; each check's docstring says how it reads it.
"""

from __future__ import annotations

import inspect
from typing import Any

from slime.rollout.rm_hub.ifbench import counting, layout, single, wording
from slime.rollout.rm_hub.ifbench.registry import CHECKS

__all__ = ["CHECKS", "InstructionError", "answer_of", "follows", "grade"]
MODULES = (counting, layout, single, wording)


class InstructionError(ValueError):
    """Metadata that no check can be run for."""


def grade(
    response: str, instruction_ids: list[str], kwargs: list[dict[str, Any] | None], loose: bool = False
) -> list[bool]:
    """Whether a response follows each of its instructions.

    Args:
        kwargs: per instruction its arguments; those that are None are left out.
        loose: also accept a response that passes without its first line, its last line, or asterisks
            (the "loose" accuracy of IFEval, arXiv:2311.07911, section 2.2).

    Raises:
        InstructionError: an unknown instruction, or one whose arguments are missing.
    """
    if len(instruction_ids) != len(kwargs):
        raise InstructionError(f"{len(instruction_ids)} instructions but {len(kwargs)} kwargs")
    answers = _variants(response) if loose else [response]
    return [
        any(follows(answer, name, values) for answer in answers)
        for name, values in zip(instruction_ids, kwargs, strict=True)
    ]


def follows(response: str, instruction_id: str, kwargs: dict[str, Any] | None) -> bool:
    """Whether a response follows one instruction. An empty response follows none."""
    function = CHECKS.get(instruction_id)
    if function is None:
        raise InstructionError(f"there is no instruction {instruction_id!r}")
    values = {key: value for key, value in (kwargs or {}).items() if value is not None}
    wanted = list(inspect.signature(function).parameters)[1:]
    missing = [key for key in wanted if key not in values]
    if missing:
        raise InstructionError(f"instruction {instruction_id!r} has no {', '.join(missing)} in its kwargs")
    response = response.rstrip().strip("\n")
    return bool(response.strip()) and bool(function(response, **{key: values[key] for key in wanted}))


def answer_of(response: str) -> str:
    """The response without the model's reasoning; nothing while the reasoning has not ended."""
    if "</think>" in response:
        return response.rsplit("</think>", 1)[1]
    return "" if response.lstrip().startswith("<think>") else response


def _variants(response: str) -> list[str]:
    split = response.strip("\n").split("\n")
    cut = [split, split[1:], split[:-1], split[1:-1]]
    texts = ["\n".join(part) for part in cut]
    return [*texts, *(text.replace("*", "") for text in texts)]
