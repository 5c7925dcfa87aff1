"""Useful tokens per second of the loops on the same work, with long-tailed response lengths.

    python benchmarks/async.py

synchronous: `slime train`, engine and trainer apart, each idle while the other works. one step off: `slime
train-async`. fully async: the same with `slime.rollout.fully_async_rollout`, without and with a bound on age. All
modes run in turn, several times, in one run of this script, with the same model, prompts and response lengths
(log-normal, drawn per sample index; the end of a turn is ignored). A useful token is one that was trained on; the
first rollouts of a block, which fill the pipeline, are left out.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import describe, write_result  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402

PROMPTS, SAMPLES = 8, 4
MEDIAN, SIGMA, LONGEST = 24, 1.1, 384
"""Response lengths: exp(N(log MEDIAN, SIGMA)), at most LONGEST."""
FULLY = ["--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout"]
FULLY += ["--over-sampling-batch-size", str(2 * PROMPTS)]
MODES = {
    "synchronous": ["train"],
    "one_step_off": ["train-async"],
    "fully_async": ["train-async", *FULLY],
    "fully_async_staleness_1": ["train-async", *FULLY, "--max-weight-staleness", "1"],
}


def response_length(index: int) -> int:
    """Tokens of the response of the sample with this index, in every mode."""
    return max(1, min(LONGEST, round(math.exp(random.Random(index).gauss(math.log(MEDIAN), SIGMA)))))


async def generate(args, sample, sampling_params):
    """The generate function of all modes: exactly `response_length` tokens."""
    from slime.rollout.sglang_rollout import generate as generate_text

    length = response_length(sample.index)
    return await generate_text(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


async def even_tokens(args, sample, **kwargs) -> float:
    """The reward of all modes: share of even token ids."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)


def write_inputs(directory: Path) -> tuple[Path, Path]:
    model, prompts = directory / "model", directory / "prompts.jsonl"
    save_tiny_model(
        str(model), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, head_dim=32
    )
    rows = [{"input": f"what is the sum of {i % 64} and {i * 7 % 64} ?"} for i in range(512)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, prompts


def run(mode: str, options: argparse.Namespace, model: Path, prompts: Path, run_dir: Path) -> dict:
    """One block of a mode; its figures without the warm-up."""
    settings = {
        "--train-backend": "fsdp",
        "--device": "cpu",
        "--hf-checkpoint": model,
        "--prompt-data": prompts,
        "--custom-generate-function-path": "benchmarks.async.generate",
        "--custom-rm-path": "benchmarks.async.even_tokens",
        "--rollout-batch-size": PROMPTS,
        "--n-samples-per-prompt": SAMPLES,
        "--global-batch-size": PROMPTS * SAMPLES,
        "--rollout-max-response-len": LONGEST,
        "--max-tokens-per-gpu": 2048,
        "--actor-num-gpus-per-node": 1,
        "--rollout-num-gpus": 1,
        "--num-rollout": options.rollouts,
        "--lr": 1e-4,
        "--run-dir": run_dir,
    }
    command, *flags = MODES[mode]
    words = [str(word) for item in settings.items() for word in item]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli", command, *words, "--use-dynamic-batch-size", *flags],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{mode}\n{done.stdout[-4000:]}\nexited with {done.returncode}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "rollout/response_lengths" in row]
    counted = rows[options.warmup :]
    return {
        "seconds": counted[-1]["time"] - rows[options.warmup - 1]["time"],
        "useful_tokens": sum(row["rollout/response_lengths"] * PROMPTS * SAMPLES for row in counted),
        "mean_staleness": statistics.mean(row["rollout/staleness/mean"] for row in counted),
        "max_staleness": max(row["rollout/staleness/max"] for row in counted),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3, help="times that each mode runs")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=3, help="rollouts left out at the start of each block")
    options = parser.parse_args()
    blocks: dict[str, list[dict]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        model, prompts = write_inputs(Path(name))
        for block in range(options.blocks):
            for mode in MODES:
                figures = run(mode, options, model, prompts, Path(name) / f"{mode}-{block}")
                blocks[mode].append(figures)
                print(mode, block, f"{figures['useful_tokens'] / figures['seconds']:.0f} useful tokens/s", flush=True)
    lengths = [response_length(i) for i in range(PROMPTS * SAMPLES * options.rollouts)]
    result = {
        "settings": vars(options) | {"prompts": PROMPTS, "samples_per_prompt": SAMPLES},
        "environment": describe("torch", "transformers", "ray"),
        "response_lengths": {
            "mean": statistics.mean(lengths),
            "median": statistics.median(lengths),
            "max": max(lengths),
        },
    }
    for mode, figures in blocks.items():
        result[mode] = {
            "useful_tokens_per_second": sum(f["useful_tokens"] for f in figures) / sum(f["seconds"] for f in figures),
            "mean_staleness": statistics.mean(f["mean_staleness"] for f in figures),
            "max_staleness": max(f["max_staleness"] for f in figures),
            "blocks": figures,
        }
    slowest = result["synchronous"]["useful_tokens_per_second"]
    for mode in MODES:
        result[mode]["ratio"] = result[mode]["useful_tokens_per_second"] / slowest
        print(
            f"{mode}: {result[mode]['ratio']:.2f} x synchronous, mean staleness {result[mode]['mean_staleness']:.2f}"
        )
    print(f"written to {write_result('async', result)}")


if __name__ == "__main__":
    main()
