"""Loading of user functions by import path, calling them in whatever form they were written, and small helpers.

Plug-ins outlive releases: their signatures differ by the date they were written, so they are called by introspection.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_NOT_USERS = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<",
)
"""Where the files of Python, of packages and of slime are."""


class HookError(ValueError):
    """A plug-in that cannot be loaded, or failed; the message names flag and path, and what is wrong."""


@functools.lru_cache(maxsize=256)
def _resolve(path: str) -> Any:
    module_name, attribute = path.split(":", 1) if ":" in path else path.rsplit(".", 1)
    target = importlib.import_module(module_name)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target


def load_function(path: str | Callable, flag: str | None = None) -> Callable:
    """The object that an import path names. `pkg.mod.name` and `pkg.mod:name` both work; a callable is returned as is.

    Raises:
        HookError: the path is malformed, the module does not import or has no such name, or it names no function.
    """
    if callable(path):
        return path
    where = f"{flag} {path!r}" if flag else f"{path!r}"
    if not isinstance(path, str) or not path.replace(":", ".").strip(".") or "." not in path.replace(":", "."):
        raise HookError(f"{where} is not an import path; write pkg.module.name or pkg.module:name")
    try:
        function = _resolve(path)
    except ModuleNotFoundError as error:
        what = f"there is no module {error.name!r} (is its folder on PYTHONPATH?){_raised_at(error)}"
        raise HookError(f"{where}: {what}") from error
    except AttributeError as error:
        raise HookError(f"{where}: {error}{_raised_at(error)}") from error
    except Exception as error:
        raise HookError(f"{where}: the import failed: {failure(error)}") from error
    if not callable(function):
        raise HookError(f"{where} is {function!r:.100}, not a function")
    return function


def failure(error: BaseException) -> str:
    """`KeyError: 'x' (/home/me/rewards.py:12)`: an exception of user code and the line of theirs that met it."""
    return f"{type(error).__name__}: {error}{_raised_at(error)}"


def _raised_at(error: BaseException) -> str:
    """` (file:line)` of the innermost frame that is neither slime's nor a library's; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def load_hook(path: str, flag: str) -> Callable:
    """As `load_function`; whatever the function raises becomes a `HookError` that names flag and path."""
    function = load_function(path, flag)

    @functools.wraps(function)
    def hook(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise HookError(f"{flag} {path} failed: {failure(error)}") from error

    return hook


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Name -> parameter of a callable, in order; empty when it has no readable signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def accepts(function: Callable, name: str) -> bool:
    """Whether `function` can be called with the keyword `name`: it has such a parameter or takes `**kwargs`."""
    found = parameters(function)
    if name in found:
        return found[name].kind != inspect.Parameter.POSITIONAL_ONLY
    return any(p.kind == inspect.Parameter.VAR_KEYWORD for p in found.values())


def accepted(function: Callable, **kwargs: Any) -> dict[str, Any]:
    """The part of `kwargs` that `function` takes."""
    return {name: value for name, value in kwargs.items() if accepts(function, name)}


def function_name(function: Callable) -> str:
    """`module.name` of a callable, for messages."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def flatten(items: Iterable) -> Iterator:
    """The leaves of nested lists, in order."""
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from flatten(item)
        else:
            yield item


def atomic_write(path: str, data: bytes) -> None:
    """Write a whole file under a temporary name, flush it to disk, then rename it."""
    directory = os.path.dirname(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=directory, prefix=os.path.basename(path) + ".", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
