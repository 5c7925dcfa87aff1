"""docs/metrics.md and docs/evaluation.md name what there is."""

import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest

from slime.observability.rollout_metrics import eval_metrics, rollout_metrics
from slime.ray.train_data import batch_metrics
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample

pytestmark = pytest.mark.unit
DOCS = Path(__file__).parents[2] / "docs"


def documented_patterns() -> list[re.Pattern]:
    """The names in backticks of the first column; {a,b} is a choice, any other {...} stands for anything."""
    cells = re.findall(r"^\| (`.+?`) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    patterns = []
    for name in re.findall(r"`([^`]+)`", " ".join(cells)):
        parts = re.split(r"(\{[^}]*\})", name)
        choice = ["(" + part[1:-1].replace(",", "|") + ")" if "," in part else ".+" for part in parts[1::2]]
        plain = [re.escape(part) for part in parts[::2]]
        patterns.append(re.compile("".join(a + b for a, b in zip(plain, [*choice, ""], strict=True))))
    return patterns


def test_every_metric_of_rollouts_and_evaluations_is_documented():
    args = Namespace(
        reward_key="s", log_reward_category="cat", log_multi_turn=True, log_passrate=True, log_correct_samples=True
    )
    spec = {"accepted_tokens": 1, "draft_tokens": 2, "verify_steps": 1, "completion_tokens": 2}
    more = {"spec_info": spec, "prefix_cache_info": {"prompt_tokens": 4, "cached_tokens": 1}}
    sample = Sample(
        group_index=0, reward={"s": 1, "cat": "ok"}, metadata={"round_number": 2}, response_length=1, **more
    )
    samples = [sample, sample.clone()]
    names = {*rollout_metrics(args, samples, 1.0, 1)}
    names |= {*eval_metrics(args, {"a": {"rewards": [1, 1], "truncated": [0, 0], "samples": samples}})}
    batch = {key: [1.0] for key in ("raw_reward", "rewards", "truncated", "response_lengths", "total_lengths")}
    names |= {*batch_metrics({**batch, "rollout_ids": [0]})}
    patterns = documented_patterns()
    assert len(names) > 40
    assert [name for name in sorted(names) if not any(p.fullmatch(name) for p in patterns)] == []


def test_every_key_of_an_evaluation_file_is_documented():
    text = (DOCS / "evaluation.md").read_text()
    assert [field.name for field in fields(EvalDatasetConfig) if f"`{field.name}`" not in text] == []
