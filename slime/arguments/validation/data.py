"""Prompt data and rewards: files exist, the first row has the columns that flags name."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from typing import Any

from slime.arguments.parser import BY_DEST
from slime.arguments.problems import Problems, closest
from slime.utils.rows import DataError, split_path

_KINDS = (".jsonl", ".parquet")
_PARQUET_MAGIC = b"PAR1"


def check(args: Namespace, problems: Problems) -> None:
    """--prompt-data with its columns, and whether anything scores the responses."""
    own_rows = args.data_source_path == BY_DEST["data_source_path"].default
    first = None
    if args.prompt_data is not None and own_rows:
        columns = {"--input-key": args.input_key, "--label-key": args.label_key, "--tool-key": args.tool_key}
        first = check_file("--prompt-data", args.prompt_data, columns, problems)
    elif own_rows and _needs_prompts(args):
        problems.add(
            "--prompt-data",
            None,
            "is required",
            "give a .jsonl or .parquet file, or --disable-rollout-global-dataset for a rollout function with its own",
        )
    _check_reward(args, first, problems)
    own_function = args.rollout_function_path != BY_DEST["rollout_function_path"].default
    if args.multimodal_keys and not args.custom_generate_function_path and not own_function:
        _check_media(args, problems)


def _check_media(args: Namespace, problems: Problems) -> None:
    """Whether engine and trainer can take images, video and audio."""
    value = json.dumps(args.multimodal_keys)
    own = "or give a --custom-generate-function-path that turns the media into text"
    if args.rollout_engine == "embedded":
        problems.add(
            "--multimodal-keys", value, "the embedded engine takes text only", f"--rollout-engine sglang, {own}"
        )
    elif not args.debug_rollout_only:
        rule = "the trainers see text only: what is generated from media cannot be trained on yet"
        problems.add("--multimodal-keys", value, rule, f"generate and score with --debug-rollout-only, {own}")


def _needs_prompts(args: Namespace) -> bool:
    return (
        args.rollout_global_dataset
        and args.load_debug_rollout_data is None
        and args.num_rollout != 0
        and not (args.debug_train_only and args.loss_type != "sft_loss")
    )


def check_file(flag: str, path: str, columns: dict[str, str | None], problems: Problems) -> dict[str, Any] | None:
    """Check that a data file exists and that its first row (jsonl) has `columns`; the row, when it could be read."""
    try:
        file, _ = split_path(path)
    except DataError as error:
        problems.add(flag, path, str(error).partition(": ")[2])
        return None
    if os.path.isdir(file):
        there = sorted(name for name in os.listdir(file) if name.endswith(_KINDS))
        fix = f"give one of its files: {', '.join(there[:5])}" if there else f"give a file ({', '.join(_KINDS)})"
        problems.add(flag, path, "is a directory", fix)
        return None
    if not os.path.isfile(file):
        problems.add(flag, path, "is not a file", _similar_file(file))
        return None
    if not file.endswith(_KINDS):
        problems.add(flag, path, f"must end in {' or '.join(_KINDS)}")
        return None
    if file.endswith(".parquet"):
        _check_parquet(flag, path, file, problems)
        return None
    return _check_first_row(flag, path, file, columns, problems)


def _check_parquet(flag: str, path: str, file: str, problems: Problems) -> None:
    """A whole parquet file begins and ends with its magic; the reader itself would take long to import."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(4)
            opened.seek(max(0, os.path.getsize(file) - 4))
            foot = opened.read(4)
    except OSError as error:
        problems.add(flag, path, f"cannot be read ({error.strerror})")
        return
    if head != _PARQUET_MAGIC or foot != _PARQUET_MAGIC:
        rule = "is cut off" if head == _PARQUET_MAGIC else "is not a parquet file"
        problems.add(flag, path, rule, "copy it again, or give a .jsonl file")


def _similar_file(file: str) -> str:
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        return f"there is no directory {folder}"
    close = closest(os.path.basename(file), os.listdir(folder))
    return f"did you mean {os.path.join(os.path.dirname(file), close)}?" if close else ""


def _check_first_row(flag: str, path: str, file: str, columns: dict, problems: Problems) -> dict[str, Any] | None:
    try:
        with open(file, encoding="utf-8-sig") as opened:
            number, line = next(((n, text) for n, text in enumerate(opened, 1) if text.strip()), (0, ""))
    except OSError as error:
        problems.add(flag, path, f"cannot be read ({error.strerror})")
        return None
    except UnicodeDecodeError as error:
        problems.add(flag, path, f"is not UTF-8 text ({error.reason} at byte {error.start})", "save it as UTF-8")
        return None
    if not line:
        problems.add(flag, path, "has no rows", "write one JSON object per line")
        return None
    try:
        row = json.loads(line)
    except ValueError as error:
        problems.add(flag, path, f"{file}:{number} is not valid JSON ({error})")
        return None
    if not isinstance(row, dict):
        problems.add(flag, path, f"{file}:{number} must be a JSON object")
        return None
    for key_flag, key in columns.items():
        if key is not None and key not in row:
            close = closest(key, row, cutoff=0.4)
            fix = f"did you mean {close}?" if close else f"give one of them with {key_flag.split()[0]}"
            problems.add(key_flag, key, f"is no key of {file}:{number}, which has {', '.join(sorted(row))}", fix)
    return row


def _check_reward(args: Namespace, first: dict[str, Any] | None, problems: Problems) -> None:
    if args.rm_type is not None and args.rm_type.endswith("remote_rm") and args.rm_url is None:
        problems.add("--rm-type", args.rm_type, "needs --rm-url", "add the address of the reward service")
    if args.rm_type in ("dapo", "boxed_dapo") and args.reward_key is None and args.custom_rm_path is None:
        problems.add("--rm-type", args.rm_type, "gives a dict of scores", "add --reward-key score")
    if first is not None and args.custom_rm_path is None and (args.rm_type or "").endswith("ifbench"):
        metadata = first.get(args.metadata_key)
        if not (isinstance(metadata, dict) and {"instruction_id_list", "kwargs"} <= metadata.keys()):
            rule = f"needs instruction_id_list and kwargs in column {args.metadata_key} of --prompt-data"
            problems.add("--rm-type", args.rm_type, rule, "see docs/rewards.md and data/ifbench")
    has_own = (
        args.rm_type
        or args.custom_rm_path
        or args.custom_generate_function_path
        or args.rollout_sample_hook_path
        or args.custom_reward_post_process_path
        or args.rollout_function_path != BY_DEST["rollout_function_path"].default
        or args.data_source_path != BY_DEST["data_source_path"].default
        or args.debug_train_only
        or args.loss_type != "policy_loss"
    )
    if has_own or first is None:
        return
    metadata = first.get(args.metadata_key)
    if not (isinstance(metadata, dict) and metadata.get("rm_type")):
        problems.add(
            "--rm-type",
            None,
            "is required: nothing says how responses are scored",
            "give --rm-type, --custom-rm-path, or rm_type in the metadata of each row",
        )
