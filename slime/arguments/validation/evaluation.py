"""Evaluation data sets and intervals."""

from __future__ import annotations

import json
import logging
from argparse import Namespace

from slime.arguments.parser import BY_DEST
from slime.arguments.problems import ConfigError, Problems
from slime.arguments.validation.data import check_file
from slime.arguments.validation.functions import check_path
from slime.arguments.validation.model import check_evaluation
from slime.utils.eval_config import EvalDatasetConfig, load_eval_datasets

logger = logging.getLogger(__name__)


def _check_reward_and_media(args: Namespace, dataset: EvalDatasetConfig, problems: Problems) -> None:
    where = f" (evaluation {dataset.name})"
    kind = (dataset.rm_type or "").removeprefix("boxed_")
    if kind == "remote_rm" and args.rm_url is None:
        problems.add(f"rm_type{where}", dataset.rm_type, "needs --rm-url", "add the address of the reward service")
    if kind == "dapo" and dataset.reward_key is None:
        problems.add(f"rm_type{where}", dataset.rm_type, "gives a dict of scores", "add reward_key: score")
    own = dataset.custom_generate_function_path or args.custom_generate_function_path
    default = args.eval_function_path == BY_DEST["rollout_function_path"].default
    if dataset.multimodal_keys and args.rollout_engine == "embedded" and default and not own:
        rule = "the embedded engine takes text only"
        problems.add(f"multimodal_keys{where}", json.dumps(dataset.multimodal_keys), rule, "--rollout-engine sglang")


def complete(args: Namespace, problems: Problems) -> None:
    """eval_datasets, and the values that default to the rollout's."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    for name in ("temperature", "top_p", "top_k", "max_response_len", "max_prompt_len", "max_context_len"):
        if getattr(args, f"eval_{name}") is None:
            setattr(args, f"eval_{name}", getattr(args, f"rollout_{name}"))
    for name in ("input_key", "label_key", "tool_key"):
        if getattr(args, f"eval_{name}") is None:
            setattr(args, f"eval_{name}", getattr(args, name))
    args.eval_datasets = []
    try:
        args.eval_datasets = load_eval_datasets(args)
    except ConfigError as error:
        problems.extend(error.problems)
        return
    source = "--eval-config" if args.eval_config else "--eval-prompt-data"
    for dataset in args.eval_datasets:
        keys = (("--eval-input-key", "input_key"), ("--eval-label-key", "label_key"), ("--eval-tool-key", "tool_key"))
        columns = {
            f"{flag if source == '--eval-prompt-data' else key} (evaluation {dataset.name})": getattr(dataset, key)
            for flag, key in keys
        }
        check_file(source, dataset.path, columns, problems)
        for key in ("custom_rm_path", "custom_generate_function_path"):
            if getattr(dataset, key) is not None:
                check_path(f"{key} (evaluation {dataset.name})", getattr(dataset, key), problems)
        _check_reward_and_media(args, dataset, problems)
    limits = [d.max_context_len for d in args.eval_datasets if d.max_context_len is not None]
    if args.eval_max_context_len is not None and limits:
        # What holds for every evaluation request; the data sets' own limits are kept by the evaluation itself.
        args.eval_max_context_len = max(args.eval_max_context_len, *limits)
    check_evaluation(args, problems)
    if args.eval_interval is not None and not args.eval_datasets:
        problems.add(
            "--eval-interval",
            args.eval_interval,
            "needs evaluation data",
            "add --eval-prompt-data NAME PATH or --eval-config",
        )
    if args.eval_datasets and args.eval_interval is None and not problems.concern("--eval-interval"):
        logger.warning("%s is given without --eval-interval: nothing will be evaluated", source)
    if args.num_rollout == 0 and args.eval_interval is None:
        problems.add("--num-rollout", 0, "without --eval-interval leaves nothing to do", "add --eval-interval 1")
