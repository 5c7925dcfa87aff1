"""The table of checks: instruction id -> function(response, **kwargs) -> bool."""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Register a check. Its keyword arguments are those of the instruction's `kwargs`."""

    def register(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return register
