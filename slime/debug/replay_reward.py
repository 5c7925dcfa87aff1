"""`slime replay-reward DUMP... --custom-rm-path my.module.reward`: reward saved responses again.

A reward function is tried on real responses without a model, an engine or a run; what changes against the rewards of
the dump is shown sample by sample.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from slime.arguments.parser import resolve
from slime.arguments.problems import ConfigError
from slime.observability.dumps import DumpError
from slime.observability.rollout_metrics import group_by_prompt
from slime.rollout.errors import RewardError
from slime.rollout.rm_hub import batched_async_rm
from slime.rollout.rm_hub.guard import raise_if_overdue
from slime.utils.async_utils import run
from slime.utils.types import Sample

TAIL = 160
"""Characters of a response that are shown."""


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 when the reward function failed, 2 for wrong flags."""
    own = argparse.ArgumentParser(
        prog="slime replay-reward",
        description=__doc__.split("\n", 1)[1].strip(),
        epilog="All other flags are those of slime train: --rm-type, --custom-rm-path, --group-rm, --reward-key, "
        "--rm-url, --rm-timeout-secs.",
    )
    own.add_argument("dumps", nargs="+", type=Path, help="rollout dumps")
    own.add_argument("--show", type=int, default=10, help="changed samples to show [%(default)s]")
    own.add_argument("--output", type=Path, help="write the samples with their new rewards to this dump")
    options, rest = own.parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        args = resolve(rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        samples = [sample for path in options.dumps for sample in read(path)]
        before = [sample.reward for sample in samples]
        replay(args, samples)
    except (RewardError, FileNotFoundError, DumpError) as error:
        print(f"slime replay-reward: {error}", file=sys.stderr)
        return 1
    print(report(args, samples, before, options.show))
    if options.output is not None:
        from slime.observability.dumps import save_rollout_dump

        save_rollout_dump(str(options.output), 0, samples)
    return 0


def read(path: Path) -> list[Sample]:
    from slime.observability.dumps import load_rollout_dump

    return load_rollout_dump(str(path), 0)


def replay(args: Namespace, samples: list[Sample]) -> None:
    """Replace the rewards of all samples by those of `args`.

    Raises:
        RewardError: naming sample and function.
    """

    async def all_groups() -> None:
        for group in group_by_prompt(samples):
            for sample in group:
                sample.reward = None
            rewards = await batched_async_rm(args, group)
            for sample, reward in zip(group, rewards, strict=True):
                sample.reward = reward

    run(all_groups(), watchdog=raise_if_overdue)


def report(args: Namespace, samples: list[Sample], before: list[Any], show: int) -> str:
    """Means, how many changed, and the first of those."""
    changed = [(s, old) for s, old in zip(samples, before, strict=True) if s.reward != old]
    lines = [f"{len(samples)} samples, {len(changed)} with another reward"]
    for name, rewards in (("dump", before), ("now", [s.reward for s in samples])):
        values = [value for reward in rewards if (value := _number(args, reward)) is not None]
        common = ", ".join(f"{value:g}: {count}" for value, count in Counter(values).most_common(5))
        lines.append(
            f"  {name:<5} mean {sum(values) / len(values):.4f}  ({common})" if values else f"  {name:<5} none"
        )
    for sample, old in changed[:show]:
        response = sample.response[-TAIL:].replace("\n", "\\n")
        lines.append(f"sample {sample.index}: {old} -> {sample.reward}  label {sample.label!r}  ...{response}")
    return "\n".join(lines)


def _number(args: Namespace, reward: Any) -> float | None:
    if isinstance(reward, dict):
        reward = reward.get(args.reward_key)
    return float(reward) if isinstance(reward, (int, float)) else None
