"""Evaluation: every prompt of every data set, n responses each, all data sets at once under one concurrency limit."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from slime.rollout.errors import RolloutError
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm_group
from slime.rollout.rm_hub import BUILTIN, is_finite
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.misc import flatten
from slime.utils.types import Sample


async def eval_rollout(args, rollout_id: int) -> dict[str, dict[str, Any]]:
    """Per data set: `{"rewards": [...], "truncated": [...], "samples": [...]}`, in the order of the file."""
    state = GenerateState(args)
    state.eval_rollout_id = rollout_id
    tasks = [asyncio.ensure_future(_evaluate(args, state, config)) for config in args.eval_datasets]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return {config.name: result for config, result in zip(args.eval_datasets, results, strict=True)}


async def _evaluate(args, state: GenerateState, config: EvalDatasetConfig) -> dict[str, Any]:
    tasks = []
    for group in _groups(_dataset(state, config), config):
        params = _sampling_params(args, config)
        _fit_context(state, config, group, params)
        tasks.append(asyncio.ensure_future(generate_and_rm_group(args, group, params, evaluation=True)))
    try:
        groups = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    samples = list(flatten(groups))
    return {
        "rewards": [_reward_value(sample, config) for sample in samples],
        "truncated": [sample.truncated for sample in samples],
        "samples": samples,
    }


def _dataset(state: GenerateState, config: EvalDatasetConfig) -> Dataset:
    """Opened once per run, then kept in the state."""
    if config.name not in state.eval_datasets:
        limits = [config.max_prompt_len, config.max_context_len and config.max_context_len - 1]
        state.eval_datasets[config.name] = Dataset(
            config.path,
            state.tokenizer,
            min((limit for limit in limits if limit is not None), default=None),
            prompt_key=config.input_key,
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key,
            multimodal_keys=config.multimodal_keys,
            apply_chat_template=config.apply_chat_template,
            apply_chat_template_kwargs=config.apply_chat_template_kwargs,
        )
    return state.eval_datasets[config.name]


def _groups(dataset: Dataset, config: EvalDatasetConfig) -> list[list[Sample]]:
    groups = []
    n = max(config.n_samples_per_eval_prompt, math.ceil((config.min_eval_samples or 0) / len(dataset)))
    for position, prompt in enumerate(dataset):
        prompt.group_index = position
        prompt.metadata = {**prompt.metadata, **config.metadata_overrides}
        prompt.custom_rm_path = config.custom_rm_path
        if config.rm_type is not None:
            prompt.metadata.setdefault("rm_type", config.rm_type)
            prompt.custom_rm_path = config.custom_rm_path or BUILTIN
        prompt.generate_function_path = config.custom_generate_function_path
        group = [prompt.clone() for _ in range(n)]
        for copy, sample in enumerate(group):
            sample.index = position * n + copy
        groups.append(group)
    return groups


def _sampling_params(args, config: EvalDatasetConfig) -> dict[str, Any]:
    params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if config.min_new_tokens is not None:
        params["min_new_tokens"] = config.min_new_tokens
    return params


def _fit_context(state: GenerateState, config: EvalDatasetConfig, group: list[Sample], params: dict[str, Any]) -> None:
    """Leave `max_context_len` to prompt and response together (text prompts; others are the generate function's)."""
    prompt = group[0].prompt
    if config.max_context_len is None or not isinstance(prompt, str):
        return
    room = config.max_context_len - len(state.tokenizer.encode(prompt, add_special_tokens=False))
    params["max_new_tokens"] = min(params["max_new_tokens"], room)


def _reward_value(sample: Sample, config: EvalDatasetConfig) -> float:
    key, reward = config.reward_key, sample.reward
    if isinstance(reward, dict):
        if key not in reward:
            what = f"reward key {key!r} is not" if key else "no reward key is given, which there must be with what is"
            raise RolloutError(
                f"evaluation {config.name}: {what} in the reward of sample {sample.index}: {sorted(reward)}"
            )
        reward = reward[key]
    if not is_finite(reward):
        raise RolloutError(
            f"evaluation {config.name}: the reward of sample {sample.index} is {reward!r:.200}, not a finite number"
        )
    return reward
