"""Rewards: built-in types, custom functions and remote services behind `async_rm` and `batched_async_rm`.

A reward that raises, hangs or is missing stops the run with a `RewardError` that names sample and function; only a
grade that ran out of time counts as 0, and then `sample.metadata["grade_error"]` says so.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from numbers import Real
from typing import Any

from slime.rollout.errors import RewardError
from slime.rollout.rm_hub.dapo import compute_dapo_reward
from slime.rollout.rm_hub.guard import call_reward_function
from slime.rollout.rm_hub.instructions import instruction_reward
from slime.rollout.rm_hub.math_answers import last_boxed
from slime.rollout.rm_hub.math_grader import grade_math
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.rm_hub.text_rewards import compute_gpqa_reward, f1_score
from slime.utils.misc import load_function, parameters
from slime.utils.types import Sample

THINK_END = ("</think>", "###Response")
BUILTIN = "builtin"
"""A `Sample.custom_rm_path` that asks for the built-in types although the run has a `--custom-rm-path`."""


async def async_rm(args, sample: Sample, **kwargs: Any) -> float | dict[str, Any]:
    """The reward of one sample: its own `custom_rm_path`, `--custom-rm-path`, or the built-in type.

    Raises:
        RewardError: naming sample, group and function.
    """
    path, flag = _custom_path(args, sample)
    if path:
        function = load_function(path, flag)
        if _group_flag_concerns(args, path) or takes_group(function):
            return (await _call_group(args, function, f"{path} ({flag})", [sample], kwargs))[0]
        name = f"{path} ({flag})"
        return check_reward(args, await call_reward_function(args, function, name, sample, kwargs), sample, name)
    return await _builtin(args, sample)


async def batched_async_rm(args, samples: list[Sample], **kwargs: Any) -> list[float | dict[str, Any]]:
    """The rewards of several samples: one call of a custom function that takes a list, else one call per sample."""
    path, flag = _custom_path(args, samples[0]) if samples else (None, None)
    if path and all(_custom_path(args, sample)[0] == path for sample in samples):
        function = load_function(path, flag)
        if _group_flag_concerns(args, path) or not _takes_single(function):
            return await _call_group(args, function, f"{path} ({flag})", samples, kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


def _custom_path(args, sample: Sample) -> tuple[str | None, str]:
    if sample.custom_rm_path == BUILTIN:
        return None, ""
    if sample.custom_rm_path:
        return sample.custom_rm_path, "Sample.custom_rm_path"
    return args.custom_rm_path, "--custom-rm-path"


def _group_flag_concerns(args, path: str) -> bool:
    """`--group-rm` speaks of `--custom-rm-path`; a sample's own function says by its parameter what it takes."""
    return args.group_rm and path == args.custom_rm_path


def _second_parameter(function: Callable) -> str:
    names = list(parameters(function))
    return names[1] if len(names) > 1 else ""


def takes_group(function: Callable) -> bool:
    """Whether a reward function is written for all samples of a prompt: its second parameter is called so."""
    return _second_parameter(function) in ("samples", "group")


def _takes_single(function: Callable) -> bool:
    return _second_parameter(function) == "sample"


async def _call_group(args, function: Callable, path: str, samples: list[Sample], kwargs: dict[str, Any]) -> list:
    rewards = await call_reward_function(args, function, path, samples, kwargs)
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
        raise RewardError.about(samples, path, f"returned {rewards!r:.200}, not a list of {len(samples)} rewards")
    return [check_reward(args, reward, sample, path) for reward, sample in zip(rewards, samples, strict=True)]


def check_reward(args, reward: Any, sample: Sample, path: str) -> float | dict[str, Any]:
    """The reward as plain Python, when it can be trained on: infinity and NaN would end up in the weights.

    Raises:
        RewardError: it is no finite number and no dict with one under `--reward-key`.
    """
    if hasattr(reward, "item"):
        try:
            reward = reward.item()
        except (ValueError, RuntimeError):  # more than one value
            raise RewardError.about(sample, path, f"returned {reward!r:.200}, not one number") from None
    if not isinstance(reward, (int, float, dict)):
        raise RewardError.about(sample, path, f"returned {reward!r:.200}, not a number or a dict")
    value = reward.get(args.reward_key, 0.0) if isinstance(reward, dict) else reward
    if not is_finite(value):
        key = f", under --reward-key {args.reward_key}" if isinstance(reward, dict) else ""
        raise RewardError.about(sample, path, f"returned {reward!r:.200}, not a finite number{key}")
    return reward


def is_finite(value: Any) -> bool:
    """Whether it is a number, of Python or numpy, and neither infinite nor NaN."""
    return isinstance(value, Real) and math.isfinite(value)


async def _builtin(args, sample: Sample) -> float | dict[str, Any]:
    name = (sample.metadata.get("rm_type") or args.rm_type or "").strip()
    response = sample.response
    kind = name.removeprefix("boxed_")
    if kind != name:
        response = last_boxed(response) or ""
    if kind not in REWARD_TYPES:
        known = ", ".join(sorted([*REWARD_TYPES, "boxed_<type>"]))
        problem = f"is unknown; use one of {known}"
        if not name:
            problem = "is missing: pass --rm-type or --custom-rm-path, or put rm_type into the metadata column"
        raise RewardError.about(sample, f"--rm-type {name!r}", problem)
    return await REWARD_TYPES[kind](args, sample, response)


async def _math(args, sample: Sample, response: str) -> float:
    return await grade_math(args, sample, response)


async def _deepscaler(args, sample: Sample, response: str) -> float:
    """The answer after the reasoning; a response that never ends its reasoning has none."""
    for marker in THINK_END:
        if marker in response:
            answer = last_boxed(response.rsplit(marker, 1)[1])
            return 0.0 if answer is None else await grade_math(args, sample, f"\\boxed{{{answer}}}")
    return 0.0


async def _dapo(args, sample: Sample, response: str) -> dict[str, Any]:
    return compute_dapo_reward(response, _label(sample, "dapo"))


async def _f1(args, sample: Sample, response: str) -> float:
    return f1_score(response, _label(sample, "f1"))


async def _gpqa(args, sample: Sample, response: str) -> float:
    return compute_gpqa_reward(response, _label(sample, "gpqa"), sample.metadata)


async def _ifbench(args, sample: Sample, response: str) -> float:
    return await instruction_reward(sample, response)


async def _random(args, sample: Sample, response: str) -> float:
    """0 or 1 by a coin that depends on seed and sample alone."""
    return float(random.Random(f"{args.rollout_seed}:{sample.index}").randint(0, 1))


async def _remote(args, sample: Sample, response: str) -> Any:
    return check_reward(args, await remote_rm(args, sample, response), sample, f"remote_rm {args.rm_url}")


def _label(sample: Sample, kind: str) -> str:
    if sample.label is None:
        raise RewardError.about(sample, f"--rm-type {kind}", "needs a label: pass --label-key")
    return sample.label if isinstance(sample.label, str) else str(sample.label)


REWARD_TYPES: dict[str, Callable] = {
    "math": _math,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": _gpqa,
    "ifbench": _ifbench,
    "random": _random,
    "remote_rm": _remote,
}
