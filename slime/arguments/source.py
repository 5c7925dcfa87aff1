"""Reading another package's options out of its source: importing it would take seconds."""

from __future__ import annotations

import ast
from typing import Any


def literal(node: ast.expr | None) -> Any:
    """A literal; None for everything that would have to be computed."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def name_of(node: ast.expr | None) -> str:
    """The last part of a name: `int`, `typing.List` -> List."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def strip_optional(kind: ast.expr) -> ast.expr:
    """`Optional[X]`, `Union[X, None]` and `X | None` -> X."""
    if isinstance(kind, ast.Subscript) and name_of(kind.value) == "Optional":
        return kind.slice
    if isinstance(kind, ast.Subscript) and name_of(kind.value) == "Union" and isinstance(kind.slice, ast.Tuple):
        members = kind.slice.elts
    elif isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        members = [kind.left, kind.right]
    else:
        return kind
    members = [member for member in members if not (isinstance(member, ast.Constant) and member.value is None)]
    return members[0] if len(members) == 1 else ast.Name("str")


def text_of(node: ast.expr | None) -> str:
    """A help text, with the parts of f-strings and sums that are constant."""
    if node is None:
        return ""
    parts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return " ".join("".join(parts).split())
