"""The checkpoint, and whether prompts and responses fit its context."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.arguments.problems import Problems
from slime.utils.checkpoint_files import missing_bytes

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""What config.json calls the number of experts, by family."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "tiktoken.model"),
)


def complete(args: Namespace, problems: Problems) -> None:
    """Check --hf-checkpoint and the lengths against its context."""
    if args.hf_checkpoint is None:
        problems.add("--hf-checkpoint", None, "is required", "give a Hugging Face checkpoint directory")
        return
    config = read_hf_config(args.hf_checkpoint, "--hf-checkpoint", problems)
    if config is None:
        return
    check_weights(args.hf_checkpoint, "--hf-checkpoint", problems)
    if not problems.concern("--hf-checkpoint"):
        check_tokenizer(args.hf_checkpoint, "--hf-checkpoint", problems)
    _check_lengths(args, context_of(config), problems)
    _check_heads(args, config, problems)
    _check_states(args, text_config(config), problems)
    _check_stop_ids(args, vocabulary_of(config), problems)
    experts = next((key for key in EXPERT_KEYS if text_config(config).get(key)), None)
    if args.use_rollout_routing_replay and args.rollout_engine == "embedded" and not args.debug_train_only:
        rule = "needs an engine that returns its routing, which --rollout-engine embedded does not"
        problems.add(
            "--use-rollout-routing-replay", None, rule, "use --rollout-engine sglang, or --use-routing-replay"
        )
    if args.attn_implementation == "slime_cudnn" and args.deterministic_mode:
        rule = "adds gradients in any order, against --deterministic-mode"
        problems.add("--attn-implementation", "slime_cudnn", rule, "use slime_varlen")
    if args.fsdp_compile is not None and experts is not None:
        rule = f"covers dense models only, and this one has experts (config.json: {experts})"
        problems.add("--fsdp-compile", args.fsdp_compile, rule, "leave it out")
    for flag in ("--use-routing-replay", "--use-rollout-routing-replay"):
        if experts is None and _value(args, flag):
            problems.add(flag, None, "needs a model with experts, and config.json names none", "leave it out")
    if args.true_on_policy_mode and experts is not None:
        rule = f"covers dense models only, and this one has experts (config.json: {experts})"
        problems.add("--true-on-policy-mode", None, rule, "leave it out")


def check_evaluation(args: Namespace, problems: Problems) -> None:
    """The lengths of each evaluation data set against the context; called once the data sets are known."""
    flags = ("--hf-checkpoint", "--rollout-max-response-len", "--rollout-max-context-len", "--sglang-context-length")
    if args.hf_checkpoint is None or problems.concern(*flags):
        return
    config = read_hf_config(args.hf_checkpoint, "--hf-checkpoint", problems) or {}
    for dataset in args.eval_datasets:
        limit, name = _tightest(args, context_of(config), ("--sglang-context-length",))
        if dataset.max_context_len is not None and (limit is None or dataset.max_context_len < limit):
            limit, name = dataset.max_context_len, f"--eval-max-context-len {dataset.max_context_len}"
        if limit is not None:
            where = f" (evaluation {dataset.name})"
            _check_pair("eval", dataset.max_prompt_len, dataset.max_response_len, limit, name, problems, where)


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
        _check_whole(path, [n for n in names if n.endswith(".safetensors")], flag, problems)
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
        return
    _check_whole(path, [n for n in shards if n.endswith(".safetensors")], flag, problems)


def _check_whole(path: str, names: Iterable[str], flag: str, problems: Problems) -> None:
    """Weight files are as long as their headers say."""
    for name in sorted(names):
        try:
            missing = missing_bytes(Path(path, name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"its {name} is no whole safetensors file ({' '.join(str(error).split())})"
        else:
            rule = f"its {name} is cut off: {missing} bytes are missing" if missing > 0 else ""
        if rule:
            problems.add(flag, path, rule, "finish the download, or copy it again")
            return


def check_tokenizer(path: str, flag: str, problems: Problems) -> None:
    """Some file that a tokenizer can be made of must be there."""
    if not any(os.path.exists(os.path.join(path, name)) for name in TOKENIZER_FILES):
        fix = "copy tokenizer.json and tokenizer_config.json beside the weights"
        problems.add(flag, path, f"holds no tokenizer ({', '.join(TOKENIZER_FILES)})", fix)


def vocabulary_of(config: dict[str, Any]) -> int | None:
    """Entries of the vocabulary; None when config.json does not say."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    return text.get("vocab_size")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that describes the language model."""
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def context_of(config: dict[str, Any]) -> int | None:
    """Longest sequence in tokens that the model was made for; None when config.json does not bound it."""
    text = text_config(config)
    if text.get("rope_scaling"):
        return None
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) and length > 0 else None


def _check_lengths(args: Namespace, model_context: int | None, problems: Problems) -> None:
    flags = ("--sglang-context-length", "--rollout-max-context-len")
    for flag in flags:
        value = _value(args, flag)
        if value is not None and model_context is not None and value > model_context:
            rule = f"exceeds the model's context (max_position_embeddings {model_context})"
            problems.add(flag, value, rule, f"use at most {model_context}")
    limit, name = _tightest(args, model_context, flags)
    if limit is not None and not args.debug_train_only:  # without engines nothing is generated
        _check_pair("rollout", args.rollout_max_prompt_len, args.rollout_max_response_len, limit, name, problems)


def _check_stop_ids(args: Namespace, vocabulary: int | None, problems: Problems) -> None:
    beyond = [i for i in args.rollout_stop_token_ids or () if vocabulary is not None and i >= vocabulary]
    if beyond:
        rule = f"is outside the model's vocabulary of {vocabulary} (config.json: vocab_size)"
        problems.add("--rollout-stop-token-ids", beyond[0], rule, "take the id from the checkpoint's own tokenizer")


def _check_heads(args: Namespace, config: dict[str, Any], problems: Problems) -> None:
    """Context-parallel ranks of the fsdp trainer share attention heads."""
    text, size = text_config(config), args.context_parallel_size
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    if not heads or size == 1 or args.train_backend == "megatron":
        return
    repeat = size // math.gcd(kv_heads, size)
    if heads % (kv_heads * repeat):
        rule = f"cannot share {heads} attention heads with {kv_heads} key/value heads evenly"
        problems.add("--context-parallel-size", size, rule, f"use a divisor of {math.gcd(heads, kv_heads)}")


def _check_states(args: Namespace, text: dict[str, Any], problems: Problems) -> None:
    """Linear attention carries a state from token to token, of which transformers' models in packed rows know
    nothing."""
    if "linear_attention" not in (text.get("layer_types") or ()) and text.get("model_type") != "qwen3_next":
        return
    rule = "has no linear attention, which this model has: its states would go from one sequence into the next"
    if args.train_backend == "fsdp" and not args.debug_rollout_only:
        problems.add("--train-backend", "fsdp", rule, "use --train-backend megatron")
    if args.rollout_engine == "embedded" and not args.debug_train_only:
        problems.add("--rollout-engine", "embedded", rule, "use --rollout-engine sglang")


def _value(args: Namespace, flag: str) -> Any:
    return getattr(args, flag[2:].replace("-", "_"))


def _tightest(args: Namespace, model_context: int | None, flags: tuple[str, ...]) -> tuple[int | None, str]:
    """The smallest bound on a sequence, with the words that name it."""
    limits = [(model_context, f"the model's context (max_position_embeddings {model_context})")]
    limits += [(_value(args, flag), f"{flag} {_value(args, flag)}") for flag in flags]
    return min((limit for limit in limits if limit[0] is not None), default=(None, ""))


def _check_pair(
    family: str, prompt: int | None, response: int, limit: int, name: str, problems: Problems, where: str = ""
) -> None:
    flag = f"--{family}-max-response-len{where}"
    if prompt is not None and prompt + response > limit:
        rule = f"+ --{family}-max-prompt-len {prompt} = {prompt + response} tokens, more than {name}"
        problems.add(flag, response, rule, f"shorten one of them by {prompt + response - limit}")
    elif prompt is None and response >= limit:
        problems.add(flag, response, f"leaves no room for a prompt within {name}", f"use less than {limit}")
