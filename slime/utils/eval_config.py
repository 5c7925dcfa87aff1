"""Evaluation data sets: from `--eval-prompt-data` or an `--eval-config` YAML to one list of settings."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, fields
from typing import Any

from slime.arguments.families.data import media_columns
from slime.arguments.families.reward import reward_type
from slime.arguments.flag import function_path, integer, json_object, number, text, to_bool
from slime.arguments.problems import ConfigError, Problem, Problems, closest
from slime.arguments.yaml_files import load_yaml


@dataclass
class EvalDatasetConfig:
    """One evaluation data set, complete: every unset value was filled from defaults, --eval-* or the rollout's.

    The reward and generate settings are None where the run's own apply.
    """

    name: str
    """Metrics are logged as eval/{name}."""
    path: str
    """.jsonl or .parquet, with an optional @[a:b]."""
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    n_samples_per_eval_prompt: int = 1
    min_eval_samples: int | None = None
    """Responses of the whole data set at least: a small one gets more per prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_prompt_len: int | None = None
    max_response_len: int = 1024
    max_context_len: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    rm_type: str | None = None
    reward_key: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    """Set in the metadata of every sample."""


def _name(raw: Any) -> str:
    name = text(raw).strip()
    if not name:
        raise ValueError("must not be empty: metrics are logged as eval/{name}")
    return name


def _texts(raw: Any) -> list[str]:
    return [text(item) for item in (raw if isinstance(raw, list) else [raw])]


def _integers(raw: Any) -> list[int]:
    return [integer(item) for item in (raw if isinstance(raw, list) else [raw])]


_CONVERTERS = {
    "name": _name,
    **dict.fromkeys(("path", "input_key", "label_key", "tool_key", "metadata_key"), text),
    "reward_key": text,
    "rm_type": reward_type,
    "multimodal_keys": media_columns,
    **dict.fromkeys(("custom_rm_path", "custom_generate_function_path"), function_path),
    **dict.fromkeys(("temperature", "top_p"), number),
    **dict.fromkeys(("n_samples_per_eval_prompt", "min_eval_samples", "top_k", "min_new_tokens"), integer),
    **dict.fromkeys(("max_prompt_len", "max_response_len", "max_context_len"), integer),
    "stop": _texts,
    "stop_token_ids": _integers,
    "apply_chat_template": to_bool,
    "apply_chat_template_kwargs": json_object,
    "metadata_overrides": json_object,
}
_ALIASES = {"prompt_key": "input_key"}
_NULLABLE = frozenset(f.name for f in fields(EvalDatasetConfig) if f.default is None)
"""Keys of which `null` takes an inherited value away (a data set without labels, say)."""
_LEGACY_NAME = "aime"
_POSITIVE = ("must be greater than 0", lambda v: v > 0)
_NOT_NEGATIVE = ("must not be negative", lambda v: v >= 0)
_RANGES = {
    **dict.fromkeys(("n_samples_per_eval_prompt", "min_eval_samples"), _POSITIVE),
    **dict.fromkeys(("max_prompt_len", "max_response_len", "max_context_len"), _POSITIVE),
    **dict.fromkeys(("temperature", "min_new_tokens"), _NOT_NEGATIVE),
    "top_p": ("must be above 0 and at most 1", lambda v: 0 < v <= 1),
    "top_k": ("must be -1 or at least 1", lambda v: v == -1 or v >= 1),
}


def load_eval_datasets(args: Namespace) -> list[EvalDatasetConfig]:
    """The data sets of a run; empty when none is given. `args` already holds resolved --eval-* values.

    Precedence: the data set's entry, the file's defaults, --eval-* flags, rollout values.

    Raises:
        ConfigError: malformed flag or file, unknown key, name given twice.
    """
    problems = Problems()
    base = _from_flags(args)
    if args.eval_config is not None:
        entries = _read_entries(args.eval_config, problems)
    else:
        entries = _entries_of_flag(args.eval_prompt_data or [], problems)
    problems.raise_if_any()
    names = [entry["name"] for entry in entries]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.append(Problem("evaluation data", f"the name {name} is given twice", "rename one"))
    problems.raise_if_any()
    return [EvalDatasetConfig(**{**base, **entry}) for entry in entries]


def _from_flags(args: Namespace) -> dict[str, Any]:
    return {
        "input_key": args.eval_input_key,
        "label_key": args.eval_label_key,
        "tool_key": args.eval_tool_key,
        "metadata_key": args.metadata_key,
        "multimodal_keys": args.multimodal_keys,
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        "temperature": args.eval_temperature,
        "top_p": args.eval_top_p,
        "top_k": args.eval_top_k,
        "max_prompt_len": args.eval_max_prompt_len,
        "max_response_len": args.eval_max_response_len,
        "max_context_len": args.eval_max_context_len,
        "min_new_tokens": args.eval_min_new_tokens,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "reward_key": args.eval_reward_key,
    }


def _entries_of_flag(words: list[str], problems: Problems) -> list[dict[str, Any]]:
    if len(words) == 1:
        words = [_LEGACY_NAME, *words]
    if len(words) % 2:
        problems.add("--eval-prompt-data", words, "must be pairs: name path name path ...", "name each path")
        return []
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]


def _read_entries(path: str, problems: Problems) -> list[dict[str, Any]]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = load_yaml(file)
    except OSError as error:
        raise ConfigError([Problem("--eval-config", f"cannot be read ({error.strerror})", value=path)]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        rule = f"is not valid YAML ({' '.join(str(error).split())})"
        raise ConfigError([Problem("--eval-config", rule, value=path)]) from None
    if isinstance(config, dict) and isinstance(config.get("eval"), dict):
        config = config["eval"]
    if not isinstance(config, dict) or not config.get("datasets"):
        problems.add("--eval-config", path, "must hold `datasets`", "list them as - {name: ..., path: ...}")
        return []
    for key in sorted(set(map(str, config)) - {"defaults", "datasets"}):
        _unknown(f"{path}: {key}", key, ("defaults", "datasets"), problems)
    defaults = _convert(config.get("defaults") or {}, f"{path}: defaults", problems)
    return [defaults | entry for entry in _datasets(config["datasets"], path, problems)]


def _datasets(raw: Any, path: str, problems: Problems) -> list[dict[str, Any]]:
    if isinstance(raw, dict):
        raw = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in raw.items()]
    if not isinstance(raw, list):
        problems.add("--eval-config", path, "`datasets` must be a list, or a mapping from names")
        return []
    entries = []
    for number_, item in enumerate(raw, 1):
        name = item.get("name") if isinstance(item, dict) else None
        where = f"{path}: data set {number_}" + (f" ({name})" if isinstance(name, str) else "")
        entry = _convert(item, where, problems)
        for key in ("name", "path"):
            if isinstance(item, dict) and key not in item:
                problems.append(Problem(where, f"has no {key}", f"add {key}: ..."))
        entries.append(entry)
    return entries


def _convert(raw: Any, where: str, problems: Problems) -> dict[str, Any]:
    if not isinstance(raw, dict):
        problems.append(Problem(where, "must be a mapping"))
        return {}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        key = _ALIASES.get(str(key), str(key))
        if key not in _CONVERTERS:
            _unknown(f"{where}: {key}", key, tuple(f.name for f in fields(EvalDatasetConfig)), problems)
        elif value is None:
            if key in _NULLABLE:
                values[key] = None
        else:
            try:
                values[key] = _CONVERTERS[key](value)
                rule, holds = _RANGES.get(key, ("", lambda v: True))
                if not holds(values[key]):
                    raise ValueError(rule)
            except ValueError as error:
                problems.append(Problem(f"{where}: {key}", str(error), value=value))
    return values


def _unknown(where: str, key: str, known: tuple[str, ...], problems: Problems) -> None:
    close = closest(key, known)
    problems.append(Problem(where, "unknown key", f"did you mean {close}?" if close else f"use {', '.join(known)}"))
