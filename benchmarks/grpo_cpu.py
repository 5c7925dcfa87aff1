"""GRPO samples per second on CPU: slime's whole loop against TRL's GRPOTrainer.

Same tiny model, prompts, group size, ragged response lengths and reward. All sides run in turn, several times, in one
run of this script; the first steps of each block are left out, and TRL's better thread count is compared with. slime's
time is the wall clock between rollouts, with everything in it: HTTP, rewards, training, weight sync.

    python -m venv .venv-trl && .venv-trl/bin/pip install -c constraints.txt torch trl
    python benchmarks/grpo_cpu.py --trl-python .venv-trl/bin/python
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import describe, write_result  # noqa: E402
from tests.tiny_model import save_tiny_model  # noqa: E402


async def distinct_words(args, sample, **kwargs) -> float:
    """The reward of both sides: number of distinct words."""
    return float(len(set(sample.response.split())))


def write_inputs(directory: Path) -> tuple[Path, Path]:
    """A four-layer model that ends its responses at random, and prompts of 9 to 27 tokens."""
    model, prompts = directory / "model", directory / "prompts.jsonl"
    save_tiny_model(
        str(model), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, head_dim=32
    )
    rng = random.Random(0)
    with prompts.open("w") as f:
        for _ in range(512):
            terms = " and ".join(str(rng.randint(0, 63)) for _ in range(rng.randint(2, 10)))
            f.write(json.dumps({"input": f"what is the sum of {terms} ?"}) + "\n")
    return model, prompts


def run(command: list[str], threads: int) -> None:
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\nexited with {done.returncode}")


def run_trl(threads: int, args, model, prompts, directory, block) -> dict:
    out = directory / f"trl-{threads}-{block}.json"
    command = [args.trl_python, "benchmarks/trl_grpo.py", "--model", str(model), "--prompts", str(prompts)]
    command += ["--out", str(out), "--steps", str(args.steps), "--prompts-per-step", str(args.prompts_per_step)]
    command += ["--group-size", str(args.group_size), "--max-new-tokens", str(args.max_new_tokens)]
    command += ["--threads", str(threads), "--seed", str(block)]
    run(command, threads)
    result = json.loads(out.read_text())
    return {"seconds": result["step_seconds"][args.warmup :], "lengths": result["mean_response_length"][args.warmup :]}


def run_slime(overlap: bool, args, model, prompts, directory, block) -> dict:
    """slime's loop; with `overlap` the next rollout is generated (one step off policy) during training."""
    run_dir = directory / f"slime-{block}-{overlap}"
    samples = args.prompts_per_step * args.group_size
    script = "train_async.py" if overlap else "train.py"
    command = [sys.executable, script, "--train-backend", "fsdp", "--device", "cpu", "--run-dir", str(run_dir)]
    command += [
        "--hf-checkpoint",
        str(model),
        "--prompt-data",
        str(prompts),
        "--rollout-shuffle",
        "--seed",
        str(block),
    ]
    command += ["--num-rollout", str(args.steps), "--rollout-batch-size", str(args.prompts_per_step)]
    command += ["--n-samples-per-prompt", str(args.group_size), "--global-batch-size", str(samples)]
    command += ["--rollout-max-response-len", str(args.max_new_tokens), "--lr", "1e-6"]
    command += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"]
    workers = str(args.slime_workers)
    if overlap:
        command += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    else:
        # Host memory need not be given back: trainers and engines fit side by side.
        command += ["--actor-num-gpus-per-node", workers, "--colocate", "--no-offload-train", "--no-offload-rollout"]
    command += ["--custom-rm-path", "benchmarks.grpo_cpu:distinct_words"]
    run(command, 1)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = [row["time"] for row in rows if "train/loss" in row]
    lengths = [row["rollout/response_len/mean"] for row in rows if "rollout/response_len/mean" in row]
    steps = [after - before for before, after in pairwise(ends)]
    return {"seconds": steps[args.warmup - 1 :], "lengths": lengths[args.warmup :]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="Python of an environment with TRL")
    parser.add_argument(
        "--trl-threads", type=int, nargs="+", default=[1, 2], help="torch threads of TRL; the best counts"
    )
    parser.add_argument("--slime-workers", type=int, default=2, help="trainer processes and engines, one thread each")
    parser.add_argument("--blocks", type=int, default=3, help="times that each side runs")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="steps left out at the start of each block")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    sides = {f"trl_{threads}_threads": partial(run_trl, threads) for threads in args.trl_threads}
    sides |= {"slime": partial(run_slime, False), "slime_async": partial(run_slime, True)}
    blocks = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, prompts = write_inputs(directory)
        for block in range(args.blocks):
            for side, function in sides.items():
                blocks[side].append(function(args, model, prompts, directory, block))
                print(side, block, f"{statistics.mean(blocks[side][-1]['seconds']):.3f} s/step", flush=True)
    result = {"settings": vars(args), "environment": describe("torch", "transformers", "ray")}
    for side, runs in blocks.items():
        seconds = [s for block in runs for s in block["seconds"]]
        result[side] = {
            "samples_per_second": args.prompts_per_step * args.group_size / statistics.mean(seconds),
            "mean_step_seconds": statistics.mean(seconds),
            "mean_response_length": statistics.mean(x for block in runs for x in block["lengths"]),
            "step_seconds": seconds,
        }
    result["environment"]["versions"]["trl"] = subprocess.run(
        [args.trl_python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    result["settings"].pop("trl_python")
    best = max(result[side]["samples_per_second"] for side in sides if side.startswith("trl"))
    for side in ("slime", "slime_async"):
        result[f"{side}_ratio"] = result[side]["samples_per_second"] / best
        print(f"{side} / TRL = {result[f'{side}_ratio']:.2f}")
    print(f"written to {write_result('grpo_cpu', result)}")


if __name__ == "__main__":
    main()
