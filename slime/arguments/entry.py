"""`parse_args`: the one call that turns a command line into the namespace that everything else reads."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from typing import Any

from slime.arguments.parser import BY_DEST, COMPUTED, MEGATRON_FLAGS, SERVER_FLAGS, resolve
from slime.arguments.problems import ConfigError, Problem
from slime.arguments.validation import validate_args


def parse_args(argv: list[str] | None = None, asynchronous: bool = False) -> Namespace:
    """Parse, merge and validate; on any mistake print all of them and exit with code 2.

    Args:
        argv: words after the program name; default `sys.argv[1:]`.
        asynchronous: by the rules of the asynchronous loop.
    """
    try:
        args = load_args(sys.argv[1:] if argv is None else argv, asynchronous)
    except ConfigError as error:
        count = len(error.problems)
        print(f"{count} configuration error{'s' if count > 1 else ''}:\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.print_config:
        print(config_to_yaml(args), end="")
        raise SystemExit(0)
    return args


def load_args(argv: list[str], asynchronous: bool = False) -> Namespace:
    """`parse_args` for callers that handle errors themselves.

    Raises:
        ConfigError: with everything that is wrong.
    """
    if "SLIME_BACKEND" in os.environ:
        raise ConfigError(
            [Problem("SLIME_BACKEND (environment)", "no longer chooses the trainer", "unset it; use --train-backend")]
        )
    args = resolve(argv)
    validate_args(args, asynchronous)
    return args


def config_to_yaml(args: Namespace) -> str:
    """The resolved configuration, without secrets and without flags that are not available yet.

    The text is itself a valid `--custom-config-path`: reading it gives the same run. What validation computed
    from it follows as comments.
    """
    import yaml

    config = public_config(args)
    computed = {key: config.pop(key) for key in COMPUTED if key in config}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110)
    for line in yaml.safe_dump(computed, sort_keys=False, allow_unicode=True, width=110).splitlines():
        text += f"# {line}\n"
    return text


def public_config(args: Namespace) -> dict[str, Any]:
    """What may be shown of the arguments: no secrets, no flags that are not available yet, no defaults of SGLang's and
    Megatron's own flags."""
    config: dict[str, Any] = {}
    foreign = {flag.dest: flag for flag in (*SERVER_FLAGS, *MEGATRON_FLAGS)}
    for key, value in vars(args).items():
        flag = BY_DEST.get(key)
        if key in foreign and value == foreign[key].default:
            continue
        if flag is None and key in COMPUTED:
            config[key] = [dataclasses.asdict(d) for d in value] if isinstance(value, (list, tuple)) else value
        elif flag is None or not (flag.pending or flag.secret or key in ("print_config", "custom_config_path")):
            config[key] = value
    return config


def public_words(words: list[str], args: Namespace) -> list[str]:
    """A command line with `***` for the values of secret flags."""
    secrets = [getattr(args, dest) for dest, flag in BY_DEST.items() if flag.secret and hasattr(args, dest)]
    values = {value for secret in secrets if secret for value in (secret if isinstance(secret, list) else [secret])}
    for value in values:
        words = [word.replace(value, "***") for word in words]
    return words
