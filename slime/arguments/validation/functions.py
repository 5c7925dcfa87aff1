"""Import paths of user functions, looked up without importing them (their modules may import torch)."""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
from argparse import Namespace
from importlib.machinery import ModuleSpec, PathFinder

from slime.arguments.families import FLAGS
from slime.arguments.flag import function_path
from slime.arguments.problems import Problems, closest
from slime.arguments.validation.signatures import call_of, definition_of, fits, written


def check(args: Namespace, problems: Problems) -> None:
    """Every function path that is not the default must name something that exists."""
    for flag in FLAGS:
        if flag.type is not function_path:
            continue
        value = getattr(args, flag.dest)
        for path in value if flag.is_list else [value]:
            if path and path != flag.default:
                check_path(flag.name, path, problems)


def check_path(flag: str, path: str, problems: Problems) -> None:
    """Add a problem when `pkg.mod.name` has no such module, or the module's source is broken, defines no such name, or
    gives it parameters that a run does not call it with."""
    module, _, name = path.rpartition(".")
    spec, rule, fix = _find_module(module)
    if spec is None:
        problems.add(flag, path, rule, fix)
        return
    try:
        tree = _source_of(spec)
    except SyntaxError as error:
        problems.add(flag, path, f"{spec.origin}:{error.lineno} is not valid Python ({error.msg})")
        return
    names = None if tree is None else _names_in(tree)
    if names is not None and name not in names:
        close = closest(name, names)
        problems.add(
            flag, path, f"{spec.origin} defines no {name}", f"did you mean {module}.{close}?" if close else ""
        )
    elif tree is not None:
        _check_signature(flag, path, tree, spec.origin, problems)


def _check_signature(flag: str, path: str, tree: ast.Module, file: str, problems: Problems) -> None:
    call, definition = call_of(flag), definition_of(tree, path.rpartition(".")[2])
    if call is None or definition is None or fits(call, *definition):
        return
    function, bound = definition
    rule = f"{file}:{function.lineno} takes {written(function, bound)}, but is called with {call}"
    problems.add(flag, path, rule, "give it these parameters; docs/rollout.md has the form of every hook")


def _find_module(module: str) -> tuple[ModuleSpec | None, str, str]:
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    if spec is None:
        return None, f"there is no module {top}", f"run with PYTHONPATH set to the directory that holds {top}"
    name = top
    for part in rest:
        locations = list(spec.submodule_search_locations or [])
        spec = _find_in(name, part, locations)
        if spec is None:
            there = [m.name for m in pkgutil.iter_modules(locations)]
            close = closest(part, there)
            return None, f"{name} has no module {part}", f"did you mean {name}.{close}?" if close else ""
        name = f"{name}.{part}"
    return spec, "", ""


def _find_in(package: str, part: str, locations: list[str]) -> ModuleSpec | None:
    """The spec of `package.part`; `package` need not be imported."""
    try:
        return PathFinder.find_spec(f"{package}.{part}", locations) if locations else None
    except KeyError:  # a folder without __init__.py, whose path Python works out from the imported parent
        spec = ModuleSpec(f"{package}.{part}", None, is_package=True)
        spec.submodule_search_locations = [path for at in locations if os.path.isdir(path := os.path.join(at, part))]
        return spec


def _source_of(spec: ModuleSpec) -> ast.Module | None:
    """A module's syntax tree; None for what is no Python file.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    with open(spec.origin, "rb") as file:
        source = file.read()
    try:
        return ast.parse(source)
    except ValueError as error:  # a null byte
        raise SyntaxError(str(error)) from None


def _names_in(tree: ast.Module) -> set[str] | None:
    """Top-level names of a module; None when they cannot be told without running it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if names & {"*", "__getattr__"} else names
