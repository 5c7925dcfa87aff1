"""The checkpoint, and whether prompts and responses fit its context."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from typing import Any

from slime.arguments.problems import Problems


def complete(args: Namespace, problems: Problems) -> None:
    """Check --hf-checkpoint and the lengths against its context."""
    if args.hf_checkpoint is None:
        problems.add("--hf-checkpoint", None, "is required", "give a Hugging Face checkpoint directory")
        return
    config = read_hf_config(args.hf_checkpoint, "--hf-checkpoint", problems)
    if config is None:
        return
    check_weights(args.hf_checkpoint, "--hf-checkpoint", problems)
    _check_lengths(args, context_of(config), problems)


def read_hf_config(path: str, flag: str, problems: Problems) -> dict[str, Any] | None:
    """config.json of a checkpoint directory; None, with a problem added, when there is none."""
    if not os.path.isdir(path):
        looks_like_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        fix = f"download it: hf download {path} --local-dir {path.split('/')[1]}" if looks_like_hub_id else ""
        problems.add(flag, path, "is not a directory", fix or "give an existing Hugging Face checkpoint directory")
        return None
    file = os.path.join(path, "config.json")
    try:
        with open(file, encoding="utf-8") as opened:
            config = json.load(opened)
    except FileNotFoundError:
        problems.add(flag, path, "holds no config.json", "give a Hugging Face checkpoint directory")
        return None
    except (OSError, ValueError) as error:
        problems.add(flag, path, f"its config.json cannot be read ({error})")
        return None
    if not isinstance(config, dict):
        problems.add(flag, path, "its config.json must hold an object")
        return None
    return config


def check_weights(path: str, flag: str, problems: Problems) -> None:
    """All weight files that the checkpoint names must be there."""
    names = os.listdir(path)
    index = next((n for n in names if n.endswith((".safetensors.index.json", ".bin.index.json"))), None)
    if index is None:
        if not any(n.endswith((".safetensors", ".bin", ".pt", ".pth")) for n in names):
            problems.add(flag, path, "holds no weights (*.safetensors)", "finish the download or conversion")
        return
    try:
        with open(os.path.join(path, index), encoding="utf-8") as file:
            shards = set(json.load(file)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        problems.add(flag, path, f"its {index} cannot be read ({error})")
        return
    missing = sorted(shards - set(names))
    if missing:
        rule = f"{len(missing)} of {len(shards)} weight files are missing, {missing[0]} first"
        problems.add(flag, path, rule, "finish the download or conversion")


def context_of(config: dict[str, Any]) -> int | None:
    """Longest sequence in tokens that the model was made for; None when config.json does not bound it."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    if text.get("rope_scaling"):
        return None
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def _check_lengths(args: Namespace, model_context: int | None, problems: Problems) -> None:
    limits = [(model_context, f"the model's context (max_position_embeddings {model_context})")]
    for flag in ("--sglang-context-length", "--rollout-max-context-len"):
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and model_context is not None and value > model_context:
            problems.add(flag, value, f"exceeds {limits[0][1]}", f"use at most {model_context}")
        limits.append((value, f"{flag} {value}"))
    context, source = min((limit for limit in limits if limit[0] is not None), default=(None, ""))
    if context is None:
        return
    for family, fallback in (("rollout", None), ("eval", args.rollout_max_response_len)):
        if family == "eval" and args.eval_max_response_len is None and args.eval_max_prompt_len is None:
            continue
        own = getattr(args, f"{family}_max_context_len")
        limit, name = (own, f"--{family}-max-context-len {own}") if own and own < context else (context, source)
        _check_pair(args, family, fallback, limit, name, problems)


def _check_pair(args: Namespace, family: str, fallback: int | None, limit: int, name: str, problems: Problems) -> None:
    prompt = getattr(args, f"{family}_max_prompt_len")
    response = getattr(args, f"{family}_max_response_len")
    response = fallback if response is None else response
    flag = f"--{family}-max-response-len"
    if prompt is not None and prompt + response > limit:
        rule = f"+ --{family}-max-prompt-len {prompt} = {prompt + response} tokens, more than {name}"
        problems.add(flag, response, rule, f"shorten one of them by {prompt + response - limit}")
    elif prompt is None and response >= limit:
        problems.add(flag, response, f"leaves no room for a prompt within {name}", f"use less than {limit}")
