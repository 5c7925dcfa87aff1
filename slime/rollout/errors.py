"""Errors that say which plug-in failed on which sample, so that a stopped run explains itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from slime.utils.misc import failure, flatten, function_name
from slime.utils.types import Sample


class RolloutError(RuntimeError):
    """Generation of a sample failed."""


class HookFailure(RolloutError):
    """A plug-in raised or returned something it must not; the message names its flag."""


class RewardError(RolloutError):
    """A reward function raised, hung or returned something it must not.

    Attributes: `sample_index`, `group_index` (of the first sample of the call) and `function` (import path).
    """

    sample_index: int | None = None
    group_index: int | None = None
    function: str = ""

    @classmethod
    def about(cls, samples: Sample | list, function: str, problem: str) -> RewardError:
        listed = list(flatten([samples]))
        first = listed[0] if listed else Sample()
        error = cls(f"reward function {function} {problem} ({describe(samples)})")
        error.sample_index, error.group_index, error.function = first.index, first.group_index, function
        return error


def describe(samples: Sample | list) -> str:
    """`sample 12 of group 3`, or the indices of several samples."""
    listed = list(flatten([samples]))
    if len(listed) == 1:
        return f"sample {listed[0].index} of group {listed[0].group_index}"
    return f"samples {[s.index for s in listed]} of group {listed[0].group_index if listed else None}"


@contextlib.contextmanager
def blame(flag: str, function: Callable | str, samples: Sample | list | None = None) -> Iterator[None]:
    """Turn any exception inside into a `HookFailure` that names flag, function and samples."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        name = function if isinstance(function, str) else function_name(function)
        about = "" if samples is None else f" for {describe(samples)}"
        raise HookFailure(f"{flag} {name} failed{about}: {failure(error)}") from error
