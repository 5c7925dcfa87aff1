"""The fields of the installed Megatron's configuration classes as flags, under Megatron's own names.

They are read from Megatron's source by its syntax tree, because importing it takes seconds and imports torch. A flag
that is not given is None, so that Megatron's (or slime's) own default holds. `slime.backends.megatron_utils.fields`
says which fields slime sets itself or cannot use.

Where `megatron.training` is installed, its further flags are accepted, too, and are there for plug-in functions as
attributes of `args`; slime's loop takes the place of the code that reads them.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.flag import OPTIONAL_BOOL, Family, Flag, integer, number, text
from slime.arguments.source import literal, name_of, strip_optional, text_of
from slime.backends.megatron_utils.fields import ALIASES, owned, refusal

CLASSES: dict[str, str] = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
}
DTYPES = ("fp32", "bf16", "fp16", "fp8")
_NOT_TYPEABLE = ("Callable", "ContextManager", "AttnBackend", "RecipeConfig")


@dataclass(frozen=True)
class Field:
    """One field of Megatron's configuration classes."""

    name: str
    classes: tuple[str, ...]
    flag: Flag


def package_dir(name: str = "megatron.core") -> Path | None:
    """Where a part of the installed Megatron lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


@functools.cache
def config_fields() -> dict[str, Field]:
    """All fields that can be typed, by name; empty when megatron-core is not installed."""
    root = package_dir()
    if root is None:
        return {}
    found: dict[str, Field] = {}
    trees: dict[str, dict[str, ast.ClassDef]] = {}
    for owner, file in CLASSES.items():
        if file not in trees:
            trees[file] = {node.name: node for node in _parsed(root / file).body if isinstance(node, ast.ClassDef)}
        for flag in _flags_of(trees[file][owner]):
            known = found.get(flag.dest)
            classes = (*known.classes, owner) if known else (owner,)
            found[flag.dest] = Field(flag.dest, classes, known.flag if known else flag)
    return found


def config_family(without: set[str]) -> Family | None:
    """The table of the fields, except those whose names or attributes are in `without`."""
    rows = []
    taken = without | {"--" + name.replace("_", "-") for name in config_fields()}  # a field's own name goes to it
    for field in config_fields().values():
        own = "--" + field.name.replace("_", "-")
        names = tuple(name for name in field.flag.names if name not in taken or (name == own and own not in without))
        taken.update(names)
        if field.name not in without and names:
            rows.append(Flag(**{**vars(field.flag), "name": names[0], "aliases": names[1:]}))
    if not rows:
        return None
    version = importlib.metadata.version("megatron-core")
    intro = f"Fields of the configuration classes of megatron-core {version} as installed."
    return Family("Megatron configuration", intro, tuple(sorted(rows, key=lambda flag: flag.name)))


def training_family(without: set[str]) -> Family | None:
    """Further flags of `megatron.training`, for plug-in functions; None when it is not installed."""
    root = package_dir("megatron.training")
    if root is None or not (root / "arguments.py").is_file():
        return None
    rows: dict[str, Flag] = {}
    taken = set(without)
    calls = [n for n in ast.walk(_parsed(root / "arguments.py")) if isinstance(n, ast.Call)]
    flags = [_from_call(node, taken) for node in calls if getattr(node.func, "attr", "") == "add_argument"]
    # Other flags are the fields of classes that it hands to a factory.
    made = {name_of(node.args[0]) for node in calls if name_of(node.func) == "ArgumentGroupFactory" and node.args}
    for file in sorted((root / "config").glob("*.py")):
        for node in _parsed(file).body:
            if isinstance(node, ast.ClassDef) and node.name in made:
                flags += _flags_of(node)
    for flag in flags:
        if flag is None or flag.dest in taken:
            continue
        names = [name for name in flag.names if not taken & {name, *_negations(flag, name)}]
        if names:
            rows[flag.dest] = Flag(**{**vars(flag), "name": names[0], "aliases": tuple(names[1:])})
            taken.update((*names, flag.dest, *(no for name in names for no in _negations(flag, name))))
    intro = "Other flags of megatron.training: attributes of `args` for plug-in functions, not read by slime."
    return Family("Megatron training", intro, tuple(rows[dest] for dest in sorted(rows))) if rows else None


def _negations(flag: Flag, name: str) -> tuple[str, ...]:
    return (f"--no-{name[2:]}",) if flag.action == OPTIONAL_BOOL else ()


def given_fields(args: Namespace, *classes: str) -> dict[str, Any]:
    """What the command line says of the fields of `classes`, beside what slime's own tables have."""
    from slime.arguments.parser import MEGATRON_FLAGS

    fields = config_fields()
    mine = [f.dest for f in MEGATRON_FLAGS if f.dest in fields and set(classes) & set(fields[f.dest].classes)]
    return {dest: getattr(args, dest) for dest in mine if getattr(args, dest) is not None}


def layer_pattern(raw: Any) -> int | list[int]:
    """`2`, or a list such as `([0]*3+[1]*58)`, which Megatron writes as a Python expression."""
    if isinstance(raw, list):
        return [integer(item) for item in raw]
    if isinstance(raw, int):
        return integer(raw)
    try:
        value = _pattern(ast.parse(text(raw).strip(), mode="eval").body)
    except SyntaxError:
        value = None
    if value is None:
        raise ValueError("must be a whole number or a list such as [0]*3+[1]*58")
    return value


def _pattern(node: ast.expr) -> int | list[int] | None:
    """Numbers, lists of them, their sums and multiples; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_pattern(item) for item in node.elts]
        return items if all(isinstance(item, int) for item in items) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _pattern(node.left), _pattern(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and {type(left), type(right)} == {int, list}:
            times = left if isinstance(left, int) else right
            return left * right if 0 <= times <= 10_000 else None
    return None


# -- reading Megatron's source ----------------------------------------------------------------------------------------


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _flags_of(cls: ast.ClassDef) -> Iterator[Flag]:
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or node.target.id.startswith("_"):
            continue
        shape = _shape(node.target.id, strip_optional(node.annotation))
        if shape is None:
            continue
        doc = text_of(after.value) if isinstance(after, ast.Expr) else ""
        if "default=" in doc:
            doc = doc.split("default=")[0]
        names = _names(node.target.id, node.value)
        yield Flag(
            name=names[0],
            aliases=names[1:],
            dest=node.target.id,
            help=doc or "See Megatron's documentation.",
            pending=refusal(node.target.id),
            **shape,
        )


def _names(field: str, value: ast.expr | None) -> tuple[str, ...]:
    """The names on Megatron's command line; of a switch the positive ones."""
    own = "--" + field.replace("_", "-")
    names = []
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            keys = [literal(key) for key in node.keys if key is not None]
            if "arg_names" in keys:
                names += literal(node.values[keys.index("arg_names")]) or []
    names = ["--" + name[5:] if name.startswith("--no-") else name for name in names]
    names = [name for name in names if not name.startswith("--disable-")]
    return tuple(dict.fromkeys((*names, *ALIASES.get(field, ()), own)))


def _shape(field: str, kind: ast.expr) -> dict[str, Any] | None:
    """Flag fields for an annotation; None for what no command line can say."""
    kind = strip_optional(kind)
    written = ast.unparse(kind)
    if written == "torch.dtype":
        return {"type": text, "choices": DTYPES} if field.startswith(("main_", "exp_avg")) else {"type": text}
    if any(word in written for word in _NOT_TYPEABLE):
        return None
    if written.startswith("Union[int, List[int]]") or field in ("moe_layer_freq", "linear_attention_freq"):
        return {"type": layer_pattern}
    if isinstance(kind, ast.Subscript):
        base = name_of(kind.value)
        if base == "Literal":
            return {
                "type": text,
                "choices": tuple(map(str, literal(kind.slice) if _many(kind) else [literal(kind.slice)])),
            }
        if base in ("List", "list", "Tuple", "tuple"):
            inner = kind.slice.elts[0] if isinstance(kind.slice, ast.Tuple) else kind.slice
            return {"nargs": "+", "type": _converter(inner)}
        return {"type": text}
    if written == "bool":
        return {"action": OPTIONAL_BOOL}
    return {"type": _converter(kind)}


def _many(kind: ast.Subscript) -> bool:
    return isinstance(kind.slice, ast.Tuple)


def _converter(kind: ast.expr | None) -> Callable[[Any], Any]:
    return {"int": integer, "float": number}.get(name_of(kind), text)


def _from_call(node: ast.Call, taken: set[str]) -> Flag | None:
    names = [name for name in map(literal, node.args) if isinstance(name, str) and name.startswith("--")]
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    if not names:
        return None
    dest = literal(options.get("dest")) or names[0][2:].replace("-", "_")
    names = [name for name in names if name not in taken]
    if not names or dest in taken or any(owned(name) for name in names):
        return None
    action, nargs = literal(options.get("action")), literal(options.get("nargs"))
    shape: dict[str, Any] = {"type": _converter(options.get("type"))}
    if action in ("store_true", "store_false"):
        shape = {"action": action}
    elif nargs is not None:
        shape |= {"nargs": nargs if nargs in ("+", "*") else "+"}
    choices = literal(options.get("choices"))
    if choices and "action" not in shape:
        shape["choices"] = tuple(map(str, choices))
        shape["type"] = text
    default = literal(options.get("default"))
    help = text_of(options.get("help")) or "See Megatron's documentation."
    return Flag(name=names[0], aliases=tuple(names[1:]), dest=dest, default=default, help=help, **shape)
