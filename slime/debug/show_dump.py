"""`slime show-dump FILE`: what is in a dump of a rollout or of train data."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from slime.observability.rollout_metrics import mean
from slime.utils.types import Sample


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slime show-dump", description=__doc__)
    parser.add_argument("dump", type=Path, help="a file of --save-debug-rollout-data or --save-debug-train-data")
    parser.add_argument("--index", type=int, nargs="+", help="only samples with these indices")
    parser.add_argument("--group", type=int, nargs="+", help="only samples of these prompts")
    parser.add_argument("--status", choices=[status.value for status in Sample.Status], help="only these")
    parser.add_argument("--count", type=int, default=5, help="samples to show [%(default)s]")
    parser.add_argument("--tokens", action="store_true", help="with token ids, masks and log-probs")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    from slime.observability.dumps import DumpError, load_dump

    try:
        content = load_dump(options.dump)
    except FileNotFoundError:
        print(f"slime show-dump: there is no file {options.dump}", file=sys.stderr)
        return 1
    except DumpError as error:
        print(f"slime show-dump: {error}", file=sys.stderr)
        return 1
    if "samples" not in content:
        print("\n".join(describe_train_data(content)))
        return 0
    samples = [Sample.from_dict(entry) for entry in content["samples"]]
    print(summary(content["rollout_id"], samples))
    chosen = [
        sample
        for sample in samples
        if (options.index is None or sample.index in options.index)
        and (options.group is None or sample.group_index in options.group)
        and (options.status is None or sample.status.value == options.status)
    ]
    for sample in chosen[: options.count]:
        print("\n" + describe_sample(sample, options.tokens))
    return 0


def summary(rollout_id: Any, samples: list[Sample]) -> str:
    """One paragraph about a rollout."""
    status = ", ".join(f"{count} {name}" for name, count in Counter(s.status.value for s in samples).most_common())
    versions = sorted({version for s in samples for version in s.weight_versions})
    rewards = [s.reward for s in samples if isinstance(s.reward, (int, float))]
    return (
        f"rollout {rollout_id}: {len(samples)} samples of {len({s.group_index for s in samples})} prompts ({status})\n"
        f"response tokens: mean {mean(s.response_length for s in samples):.1f}, "
        f"{mean(s.effective_response_length for s in samples):.1f} of them trained on, "
        f"max {max((s.response_length for s in samples), default=0)}\n"
        f"reward: mean {mean(rewards):.4f}; weight versions: {', '.join(versions) or 'unknown'}"
    )


def describe_sample(sample: Sample, with_tokens: bool = False) -> str:
    """A sample for reading."""
    lines = [
        f"sample {sample.index} of prompt {sample.group_index}: {sample.status.value}, reward {sample.reward}, "
        f"label {sample.label!r}, {sample.response_length} tokens, weight versions {sample.weight_versions}",
        f"  prompt:   {sample.prompt!r}",
        f"  response: {sample.response!r}",
    ]
    if sample.metadata:
        lines.append(f"  metadata: {sample.metadata!r}")
    if with_tokens:
        start = len(sample.tokens) - sample.response_length
        lines.append(f"  prompt tokens: {sample.tokens[:start]}")
        masks = sample.loss_mask or [1] * sample.response_length
        log_probs = sample.rollout_log_probs or [float("nan")] * sample.response_length
        rows = zip(sample.tokens[start:], masks, log_probs, strict=True)
        lines.append("  response token, mask, log-prob: " + " ".join(f"{t}/{m}/{p:.3f}" for t, m, p in rows))
    return "\n".join(lines)


def describe_train_data(content: dict[str, Any]) -> list[str]:
    """Per key: how many entries, their total length, their mean."""
    lines = [f"train data of rollout {content['rollout_id']}, rank {content['rank']}"]
    for key, values in sorted(content["rollout_data"].items()):
        entries = list(values) if hasattr(values, "__len__") else [values]
        numbers = [float(x) for entry in entries for x in _numbers(entry)]
        text = f"{len(numbers)} numbers, mean {mean(numbers):.6g}" if numbers else f"e.g. {str(entries[:1])[:80]}"
        lines.append(f"  {key:<24} {len(entries)} entries, {text}")
    return lines


def _numbers(entry: Any) -> list[float]:
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, (int, float)):
        return [entry]
    return [x for x in entry if isinstance(x, (int, float))] if isinstance(entry, list) else []
