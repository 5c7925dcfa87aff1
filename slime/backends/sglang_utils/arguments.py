"""The server arguments of the installed SGLang as `--sglang-*` flags.

They are read from SGLang's source by its syntax tree: importing it takes seconds, and a typing mistake on the command
line must be reported at once. SGLang itself checks values again when a server starts.
"""

from __future__ import annotations

import ast
import functools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.arguments.flag import OPTIONAL_BOOL, STORE_TRUE, Family, Flag, integer, number, text
from slime.arguments.source import literal, name_of, strip_optional, text_of
from slime.backends.sglang_utils import compat

PREFIX = "--sglang-"
FIELD_FILES = ("srt/arg_groups/fields/*.py", "srt/server_args.py")
NOT_SERVER_FLAGS = ("--help", "--config")


@functools.cache
def server_flags() -> tuple[Flag, ...]:
    """All arguments of the installed SGLang's server; empty when it is not installed."""
    root = compat.package_dir()
    if root is None:
        return ()
    flags: dict[str, Flag] = {}
    for pattern in FIELD_FILES:
        for path in sorted(root.glob(pattern)):
            for flag in _flags_in(path):
                flags.setdefault(flag.dest, flag)
    return tuple(flags[dest] for dest in sorted(flags))


def server_family(without: set[str]) -> Family | None:
    """The table of the server arguments, except those whose names or attributes are in `without`."""
    flags = [flag for flag in server_flags() if flag.dest not in without]
    taken = {name for name in without if name.startswith("--")}
    rows = []
    for flag in flags:
        names = [name for name in flag.names if name not in taken]
        if names:
            taken.update(names)
            rows.append(_renamed(flag, names))
    if not rows:
        return None
    intro = f"Arguments of SGLang {compat.installed_version()} as installed, with the prefix --sglang-."
    return Family("SGLang server", intro, tuple(rows))


def _renamed(flag: Flag, names: list[str]) -> Flag:
    values = {**vars(flag), "name": names[0], "aliases": tuple(names[1:])}
    return Flag(**values)


def given_words(args: Namespace, flags: tuple[Flag, ...]) -> list[str]:
    """Command-line words for SGLang of those `flags` that are not at their default."""
    words: list[str] = []
    for flag in flags:
        value = getattr(args, flag.dest)
        if value != flag.default:
            words += to_words(flag.name.removeprefix("--sglang"), value, optional_bool=flag.action == OPTIONAL_BOOL)
    return words


def to_words(name: str, value: Any, optional_bool: bool = False) -> list[str]:
    """`-tp-size`, 2 -> ["--tp-size", "2"]; false and None give nothing."""
    name = "--" + name.lstrip("-").replace("_", "-")
    if isinstance(value, bool):
        return [name] if value else ([f"--no-{name[2:]}"] if optional_bool else [])
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [name, *map(str, value)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


# -- reading SGLang's source ------------------------------------------------------------------------------------------


def _flags_in(path: Path) -> Iterator[Flag]:
    """Fields declared as `name: A[type, help or Arg(...)] = default`, and plain `parser.add_argument` calls."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            flag = _from_field(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flag = _from_call(node)
        else:
            continue
        if flag is not None:
            yield flag


def _from_field(node: ast.AnnAssign) -> Flag | None:
    annotation = node.annotation
    if not isinstance(annotation, ast.Subscript) or getattr(annotation.value, "id", "") not in ("A", "Annotated"):
        return None
    if not isinstance(annotation.slice, ast.Tuple) or len(annotation.slice.elts) < 2:
        return None
    kind, meta = annotation.slice.elts[:2]
    options: dict[str, Any] = {"help": meta}
    if isinstance(meta, ast.Call):
        if getattr(meta.func, "id", "") != "Arg":
            return None
        options = {keyword.arg: keyword.value for keyword in meta.keywords}
    if literal(options.get("no_cli")) is True:
        return None
    field = node.target.id
    names = [literal(options.get("cli_name")) or _cli(field), *(literal(options.get("aliases")) or [])]
    if _cli(field) not in names:
        names.append(_cli(field))
    return _flag(field, names, strip_optional(kind), options, literal(node.value))


def _from_call(node: ast.Call) -> Flag | None:
    names = [name for name in map(literal, node.args) if isinstance(name, str) and name.startswith("--")]
    if not names or names[0] in NOT_SERVER_FLAGS:
        return None
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    field = literal(options.get("dest")) or names[0][2:].replace("-", "_")
    return _flag(field, names, options.get("type"), options, literal(options.get("default")))


def _flag(field: str, names: list[str], kind: ast.expr | None, options: dict[str, Any], default: Any) -> Flag:
    shape = _shape(kind, options)
    if shape.get("action") == STORE_TRUE:
        default = bool(default)
    prefixed = [PREFIX + name.lstrip("-") for name in names]
    return Flag(
        name=prefixed[0],
        aliases=tuple(prefixed[1:]),
        dest=f"sglang_{field}",
        default=None if isinstance(default, (list, dict, tuple)) and not default else default,
        help=text_of(options.get("help")) or "See SGLang's documentation.",
        **shape,
    )


def _shape(kind: ast.expr | None, options: dict[str, Any]) -> dict[str, Any]:
    """action, nargs, type and choices."""
    action = ast.unparse(options["action"]) if "action" in options else ""
    if "BooleanOptional" in action:
        return {"action": OPTIONAL_BOOL}
    if "store_true" in action or "StoreTrue" in action or (not action and name_of(kind) == "bool"):
        return {"action": STORE_TRUE}
    nargs = literal(options.get("nargs"))
    if isinstance(kind, ast.Subscript) and name_of(kind.value) in ("List", "list") and "type_parser" not in options:
        return {"nargs": nargs if nargs in ("+", "*") else "+", "type": _converter(kind.slice)}
    if "LoRAPath" in action or nargs in ("+", "*"):
        return {"nargs": nargs if nargs in ("+", "*") else "*", "type": text}
    if "type_parser" in options:
        return {"type": text}
    return {"type": _converter(kind)}


def _converter(kind: ast.expr | None) -> Callable[[Any], Any]:
    return {"int": integer, "float": number}.get(name_of(kind), text)


def _cli(field: str) -> str:
    return "--" + field.replace("_", "-")
