"""Configuration errors: collected, so that one run reports all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One configuration error: which flag, which value, which rule it breaks, and what to do about it."""

    flag: str
    rule: str
    fix: str = ""
    value: Any = None

    def __str__(self) -> str:
        subject = self.flag if self.value is None else f"{self.flag} {show(self.value)}"
        text = f"{subject}: {self.rule}"
        return f"{text}\n    fix: {self.fix}" if self.fix else text


class ConfigError(ValueError):
    """The configuration cannot be run; `problems` holds every reason that was found."""

    def __init__(self, problems: list[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(f"  {problem}" for problem in self.problems))


class Problems(list):
    """A list of `Problem` with a short way to add one."""

    def add(self, flag: str, value: Any, rule: str, fix: str = "") -> None:
        self.append(Problem(flag, rule, fix, value))

    def concern(self, *flags: str) -> bool:
        """Whether one of `flags` is already wrong, so that rules built on it would only repeat that."""
        return any(problem.flag in flags for problem in self)

    def raise_if_any(self) -> None:
        if self:
            raise ConfigError(self)


def show(value: Any) -> str:
    """A value as a user would type it."""
    if isinstance(value, (list, tuple)):
        return " ".join(str(v) for v in value)
    return str(value) if value != "" else "''"


def closest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option that `word` was probably meant to be; swapped letters count for it."""
    close = difflib.get_close_matches(word, list(options), n=5, cutoff=cutoff)
    return next((option for option in close if sorted(option) == sorted(word)), close[0] if close else None)
