"""How well the schedule packs and balances: token efficiency, imbalance over ranks, time to plan.

`python benchmarks/schedule.py` plans rollouts of log-normal lengths and writes benchmarks/results/schedule.json.

- efficiency: real tokens / computed tokens, where all ranks meet in every micro-batch and each waits for the largest
  of the round: sum of tokens / (ranks x sum over rounds of the largest micro-batch).
- imbalance: tokens (FLOPs) of the fullest rank over the mean, minus 1.
- extra_micro_batches: how many more there are than the tokens need at the least.
- stride: the same without balancing, samples in order, as a yardstick.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.environment import describe, write_result
from slime.training.flops import ModelFlops
from slime.training.schedule import build_dp_schedule

SEEDS = 20
# name: (samples, data-parallel ranks, token cap, median length, sigma)
WORKLOADS = {
    "math, 8k responses": (512, 8, 16_384, 2_000, 0.8),
    "long reasoning, 32k": (512, 8, 32_768, 8_000, 0.7),
    "agents, 64k": (256, 16, 65_536, 12_000, 1.0),
    "short chat": (1_024, 4, 8_192, 300, 1.0),
    "few samples per rank": (128, 16, 16_384, 2_000, 0.8),
}
QWEN3_4B = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
}


def draw_lengths(seed: int, samples: int, cap: int, median: float, sigma: float) -> list[int]:
    draws = np.random.default_rng(seed).lognormal(math.log(median), sigma, samples)
    return np.clip(draws, 16, cap).astype(int).tolist()


def measure(lengths: list[int], dp_size: int, cap: int, costs: list[int], by_costs: bool, balance: bool) -> dict:
    start = time.perf_counter()
    (step,) = build_dp_schedule(
        lengths,
        list(range(len(lengths))),
        dp_size=dp_size,
        num_steps=1,
        max_tokens=cap,
        balance=balance,
        costs=costs if by_costs else None,
    ).steps
    seconds = time.perf_counter() - start

    def totals(values: list[int]) -> np.ndarray:
        return np.array([[sum(values[i] for i in mb) for mb in rank] for rank in step.micro_batches], dtype=float)

    tokens, flops = totals(lengths), totals(costs)
    least = -(-math.ceil(tokens.sum() / cap) // dp_size)
    return {
        "efficiency": tokens.sum() / (dp_size * tokens.max(0).sum()),
        "flops_efficiency": flops.sum() / (dp_size * flops.max(0).sum()),
        "imbalance": tokens.sum(1).max() * dp_size / tokens.sum() - 1,
        "flops_imbalance": flops.sum(1).max() * dp_size / flops.sum() - 1,
        "extra_micro_batches": tokens.shape[1] - least,
        "seconds": seconds,
    }


def summary(runs: list[dict]) -> dict:
    """Mean over seeds; the worst seed of the imbalances."""
    out = {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
    for key in ("imbalance", "flops_imbalance"):
        out[f"worst_{key}"] = round(float(max(run[key] for run in runs)), 4)
    return out


def main() -> None:
    model = ModelFlops.of_hf_config(QWEN3_4B)
    result = {"environment": describe("numpy"), "seeds": SEEDS, "workloads": {}}
    for name, (samples, dp_size, cap, median, sigma) in WORKLOADS.items():
        runs: dict[str, list[dict]] = {"tokens": [], "flops": [], "stride": []}
        for seed in range(SEEDS):
            lengths = draw_lengths(seed, samples, cap, median, sigma)
            costs = [model.forward(length) for length in lengths]
            for kind, collected in runs.items():
                collected.append(measure(lengths, dp_size, cap, costs, kind == "flops", kind != "stride"))
        shape = {"samples": samples, "ranks": dp_size, "cap": cap, "median_length": median, "sigma": sigma}
        result["workloads"][name] = {**shape, **{kind: summary(collected) for kind, collected in runs.items()}}
        print(name, shape)
        for kind in runs:
            print(f"  {kind:7}", result["workloads"][name][kind])
    print(write_result("schedule", result))


if __name__ == "__main__":
    main()
