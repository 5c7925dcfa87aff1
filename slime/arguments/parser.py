"""From a command line and a YAML file to one namespace; every mistake is collected, not only the first.

argparse splits the command line and prints help. Values stay text until `Flag.convert`, so that a wrong value is
reported with flag, rule and fix, beside all other mistakes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import re
from argparse import Namespace
from typing import Any

from slime.arguments.families import FAMILIES, FLAGS, engine, megatron
from slime.arguments.flag import APPEND, OPTIONAL_BOOL, STORE_FALSE, STORE_TRUE, BadChoice, Flag, to_bool
from slime.arguments.problems import ConfigError, Problem, Problems, closest
from slime.arguments.yaml_files import load_yaml

_SERVER = engine.server_family()
SERVER_FLAGS: tuple[Flag, ...] = _SERVER.flags if _SERVER else ()
"""Arguments of the installed SGLang that are in no table of slime's own."""
_MEGATRON = megatron.installed_families()
MEGATRON_FLAGS: tuple[Flag, ...] = tuple(flag for family in _MEGATRON for flag in family.flags)
"""Flags of the installed Megatron that are in no table of slime's own."""
ALL_FAMILIES = (*FAMILIES, *((_SERVER,) if _SERVER else ()), *_MEGATRON)
ALL_FLAGS = (*FLAGS, *SERVER_FLAGS, *MEGATRON_FLAGS)
BY_DEST: dict[str, Flag] = {flag.dest: flag for flag in ALL_FLAGS}
BY_NAME: dict[str, Flag] = {name: flag for flag in ALL_FLAGS for name in flag.names}
_NEGATIONS = {f"--no-{flag.name[2:]}": flag for flag in ALL_FLAGS if flag.action == OPTIONAL_BOOL}
_OWN_NAMES = tuple(name for name, flag in (BY_NAME | _NEGATIONS).items() if flag in FLAGS)
_PREFIXES = (engine.PREFIX, megatron.PREFIX)
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*")
NO_MEGATRON = "megatron-core is not installed, so its flags are not known here"
COMPUTED = ("use_critic", "role_overrides", "eval_datasets", "served_models", "sglang_model_routers")
"""Attributes that validation adds; nobody may set them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        flag, _, rule = message.removeprefix("argument ").partition(": ")
        if not rule:
            flag, rule = "command line", message
        name = flag.split("/")[0]
        if rule.startswith("ignored explicit argument"):
            raise ConfigError([Problem(name, "takes no value", f"write {name} alone, or leave it out")])
        # argparse takes -1e-3, and texts that begin with a dash, for flags
        fix = (
            f"a value that begins with - is written {name}=VALUE" if rule.startswith("expected") else "see slime flags"
        )
        raise ConfigError([Problem(name, rule, fix)])


@functools.cache
def build_parser(prog: str = "slime train") -> argparse.ArgumentParser:
    """An argparse parser of all tables, grouped by family. Flags that are not given leave no attribute."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    for family in ALL_FAMILIES:
        group = parser.add_argument_group(family.title, _escape(family.intro))
        for flag in family.flags:
            _add(group, flag)
    return parser


def _add(group, flag: Flag) -> None:
    options: dict[str, Any] = {"dest": flag.dest, "help": _escape(_help(flag))}
    if flag.action in (STORE_TRUE, STORE_FALSE):
        options.update(action="store_const", const=flag.action == STORE_TRUE)
    elif flag.action == OPTIONAL_BOOL:
        options.update(action=argparse.BooleanOptionalAction)
    else:
        options.update(metavar=metavar(flag), nargs=flag.nargs)
        if flag.action == APPEND:
            options.update(action="append")
    group.add_argument(*flag.names, **options)


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _help(flag: Flag) -> str:
    if flag.pending:
        return f"NOT AVAILABLE YET: {flag.pending}."
    shown = flag.default not in (None, "", [], {}) and not flag.is_bool
    return f"{flag.help} [{default_text(flag)}]" if shown else flag.help


def metavar(flag: Flag) -> str:
    """What stands for the value in help and docs."""
    if flag.choices and len(flag.choices) <= 7:
        return "{" + ",".join(flag.choices) + "}"
    kinds = {"integer": "INT", "number": "FLOAT", "json_object": "JSON", "function_path": "FUNCTION"}
    return kinds.get(flag.type.__name__, "STR")


def default_text(flag: Flag) -> str:
    """The default as a user would type it; empty when there is none."""
    if flag.default is None:
        return ""
    if flag.action == STORE_FALSE:
        return ""
    if isinstance(flag.default, (list, dict)):
        return " ".join(map(str, flag.default)) if flag.default else ""
    return str(flag.default)


def resolve(argv: list[str]) -> Namespace:
    """Defaults, then `--custom-config-path`, then the command line. No rule across flags is checked here.

    Raises:
        ConfigError: with all unknown flags, wrong values and flags that are not available yet.
    """
    problems = Problems()
    given, unknown = build_parser().parse_known_args(argv)
    _report_unknown(unknown, problems)
    command_line = {}
    for dest, raw in vars(given).items():
        _convert(BY_DEST[dest], raw, BY_DEST[dest].name, command_line, problems)
    from_yaml: dict[str, Any] = {}
    if command_line.get("custom_config_path") is not None:
        from_yaml = _read_custom_config(command_line["custom_config_path"], problems)
    args = Namespace(**{flag.dest: copy.deepcopy(flag.default) for flag in ALL_FLAGS})
    vars(args).update(from_yaml)
    vars(args).update(command_line)
    problems.raise_if_any()
    return args


def _convert(flag: Flag, raw: Any, shown_name: str, into: dict[str, Any], problems: Problems) -> None:
    try:
        value = flag.convert(raw)
        if value is None and flag.default is not None:
            raise ValueError("must have a value")
    except BadChoice as error:
        close = closest(error.value, flag.choices, cutoff=0.5)
        problems.add(shown_name, raw, str(error), f"did you mean {close}?" if close else "")
        return
    except ValueError as error:
        problems.add(shown_name, raw, str(error))
        return
    off = flag.action == OPTIONAL_BOOL and value is False
    asks_for_nothing = value is None or off or (flag.is_bool and value == flag.default)
    reason = None if asks_for_nothing else flag.pending
    if reason is None and flag.pending_choices and value is not None:
        for item in value if flag.is_list else [value]:
            reason = reason or flag.pending_choices.get(item)
    if reason:
        problems.add(shown_name, None if flag.is_bool else raw, f"not available yet: {reason}", "leave it out")
        return
    into[flag.dest] = value


def _report_unknown(unknown: list[str], problems: Problems) -> None:
    """Name each unknown flag once; the words after it are its values."""
    after_flag = False
    for word in unknown:
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
            problems.append(unknown_flag(word.split("=")[0]))
            after_flag = True
        elif not after_flag:
            problems.append(Problem(word, "is not a flag", "flags start with --; quote values that hold blanks"))


def unknown_flag(name: str) -> Problem:
    """Why `name` cannot be given: reserved, of an engine that is not there, or a typing mistake."""
    attribute = engine.attribute_of(name)
    if attribute in engine.OWNED_BY_SLIME:
        instead = engine.OWNED_BY_SLIME[attribute]
        return Problem(name, "slime sets this itself", f"use {instead}" if instead else "leave it out")
    if megatron.owned(name):
        return Problem(name, "slime sets this itself", megatron.owned(name))
    if megatron.is_field(name) and not MEGATRON_FLAGS:
        return Problem(name, NO_MEGATRON, megatron.INSTALL_MEGATRON)
    unread = name.startswith(engine.PREFIX) and not SERVER_FLAGS
    close = did_you_mean(name, cutoff=0.9 if unread or name.startswith(megatron.PREFIX) else 0.6)
    if not close and unread:
        rule = "SGLang is not installed, so its arguments are not known here"
        return Problem(name, rule, engine.INSTALL_SGLANG)
    if not close and name.startswith(megatron.PREFIX) and not MEGATRON_FLAGS:
        return Problem(name, NO_MEGATRON, megatron.INSTALL_MEGATRON)
    return Problem(name, "unknown flag", f"did you mean {close}?" if close else "slime flags lists all flags")


def did_you_mean(name: str, cutoff: float) -> str | None:
    """The known flag that is closest to `name`, if any is close."""
    dashed = "--" + name.lstrip("-").replace("_", "-").lower()
    if dashed in BY_NAME or dashed in _NEGATIONS:
        return dashed
    return closest(dashed, _OWN_NAMES, cutoff) or closest(dashed, [*BY_NAME, *_NEGATIONS], cutoff)


def _read_custom_config(path: str, problems: Problems) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = load_yaml(file)
    except OSError as error:
        problems.add("--custom-config-path", path, f"cannot be read ({error.strerror})")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.add("--custom-config-path", path, f"is not valid YAML ({' '.join(str(error).split())})")
        return {}
    if config is None:
        return {}
    if not isinstance(config, dict):
        problems.add("--custom-config-path", path, "must hold a mapping of flag names to values")
        return {}
    values: dict[str, Any] = {}
    for key, raw in config.items():
        _take_yaml_key(str(key), raw, values, problems)
    return values


def _take_yaml_key(key: str, raw: Any, values: dict[str, Any], problems: Problems) -> None:
    """One YAML entry: a flag by its name or attribute, or a new attribute for the user's own functions."""
    dest = key.removeprefix("--").replace("-", "_")
    dashed = "--" + dest.replace("_", "-")
    shown = f"{key} (in --custom-config-path)"
    if dest in BY_DEST:
        _convert(BY_DEST[dest], raw, shown, values, problems)
    elif dashed in BY_NAME:
        flag = BY_NAME[dashed]
        if flag.action == STORE_FALSE:
            raw = _negate(raw, shown, problems)
        _convert(flag, raw, shown, values, problems)
    elif dashed in _NEGATIONS:
        _convert(_NEGATIONS[dashed], _negate(raw, shown, problems), shown, values, problems)
    elif dest in COMPUTED:
        problems.add(shown, None, "is computed from other flags and cannot be set", "leave it out")
    elif not _ATTRIBUTE.fullmatch(dest):
        problems.add(shown, None, "is no name that an attribute can have", "use letters, digits and underscores")
    elif dashed.startswith(_PREFIXES) or did_you_mean(dashed, cutoff=0.88):
        problem = unknown_flag(dashed)
        problems.append(Problem(shown, problem.rule, problem.fix))
    else:
        values[dest] = raw


def _negate(raw: Any, shown: str, problems: Problems) -> Any:
    try:
        return not to_bool(raw)
    except ValueError as error:
        problems.add(shown, raw, str(error))
        return False
