"""One command-line flag as data, and the conversion of what a user wrote into its value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STORE_TRUE = "store_true"
STORE_FALSE = "store_false"
OPTIONAL_BOOL = "optional_bool"
APPEND = "append"
BOOL_ACTIONS = (STORE_TRUE, STORE_FALSE, OPTIONAL_BOOL)

_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")


@dataclass(frozen=True)
class Flag:
    """One row of a flag table.

    A flag with `pending` set is known but its feature is not built: giving it is an error that says so. Delete the
    keyword when the feature lands. `pending_choices` does the same for single values of an otherwise working flag.
    """

    name: str
    type: Callable[[Any], Any] = str
    default: Any = None
    help: str = ""
    choices: tuple[str, ...] = ()
    choice_aliases: dict[str, str] = field(default_factory=dict)
    nargs: str | None = None
    """None (one value), "+" or "*"."""
    action: str | None = None
    dest: str = ""
    aliases: tuple[str, ...] = ()
    pending: str | None = None
    pending_choices: dict[str, str] = field(default_factory=dict)
    secret: bool = False
    """Never printed or written to disk."""

    def __post_init__(self):
        if not self.dest:
            object.__setattr__(self, "dest", self.name.removeprefix("--").replace("-", "_"))
        if self.action in (STORE_TRUE, STORE_FALSE):
            object.__setattr__(self, "default", self.action == STORE_FALSE)

    @property
    def is_bool(self) -> bool:
        return self.action in BOOL_ACTIONS

    @property
    def is_list(self) -> bool:
        return self.nargs is not None or self.action == APPEND

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def convert(self, raw: Any) -> Any:
        """The value of this flag from text (command line) or from a YAML value.

        Raises:
            ValueError: the value does not fit; the message states the rule.
        """
        if self.is_bool:
            return to_bool(raw)
        if raw is None:
            return None
        if self.is_list:
            return [self._convert_one(item) for item in (raw if isinstance(raw, (list, tuple)) else [raw])]
        return self._convert_one(raw)

    def _convert_one(self, raw: Any) -> Any:
        value = self.type(raw)
        if self.choices:
            value = self.choice_aliases.get(value, value)
            if value not in self.choices:
                raise BadChoice(value, self.choices)
        return value


class BadChoice(ValueError):
    """The value is not among the choices."""

    def __init__(self, value: str, choices: tuple[str, ...]):
        self.value, self.choices = value, choices
        super().__init__(f"must be one of {', '.join(choices)}")


@dataclass(frozen=True)
class Family:
    """A group of flags that are documented together."""

    title: str
    intro: str
    flags: tuple[Flag, ...]


def to_bool(raw: Any) -> bool:
    """True or False from a bool or from the words YAML users write, quoted or not."""
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in _TRUE_WORDS:
        return True
    if word in _FALSE_WORDS:
        return False
    raise ValueError("must be true or false")


def text(raw: Any) -> str:
    """A string; YAML numbers become text, structures are refused."""
    if isinstance(raw, (dict, list, bool)):
        raise ValueError("must be a string")
    return str(raw)


def integer(raw: Any) -> int:
    """A whole number; `2.0` and `1_000` are accepted, `2.5` and `true` are not."""
    if isinstance(raw, bool):
        raise ValueError("must be a whole number")
    try:
        if isinstance(raw, float):
            if not raw.is_integer():
                raise ValueError
            return int(raw)
        return int(str(raw))
    except (ValueError, OverflowError):
        raise ValueError("must be a whole number") from None


def number(raw: Any) -> float:
    """A finite float."""
    if isinstance(raw, bool):
        raise ValueError("must be a number")
    try:
        value = float(raw)
    except (TypeError, ValueError):
        raise ValueError("must be a number") from None
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def json_object(raw: Any) -> dict[str, Any]:
    """A mapping, given as JSON text or as a YAML mapping."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"must be a JSON object ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError('must be a JSON object such as {"key": "value"}')
    return raw


def function_path(raw: Any) -> str:
    """`pkg.mod.fn` from either spelling, `pkg.mod.fn` or `pkg.mod:fn`."""
    path = text(raw).strip()
    if not _FUNCTION_PATH.fullmatch(path):
        raise ValueError("must be an import path: pkg.mod.fn or pkg.mod:fn")
    return path.replace(":", ".")
