"""GRPO where trainer and engine compute the same bits; prints how far their log-probs are apart after every step."""

from __future__ import annotations

import json
from collections.abc import Sequence

from examples.common.launch import ROOT, parse, slime
from examples.common.tiny import quickstart_task

SFT_STEPS = 180
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
FOR_A_MODEL = {
    "--train-backend": "fsdp",
    "--actor-num-gpus-per-node": 1,
    "--prompt-data": ROOT / "data" / "gsm8k" / "train.jsonl",
    "--input-key": "question",
    "--label-key": "answer",
    "--num-rollout": 100,
    "--rollout-max-response-len": 512,
    "--eps-clip-high": 0.28,
    "--lr": 1e-6,
    "--lr-warmup-iters": 5,
    "--use-dynamic-batch-size": None,
    "--max-tokens-per-gpu": 8192,
    "--gradient-checkpointing": None,
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("true_on_policy", __doc__, argv, SFT_STEPS)
    flags: dict[str, object] = {
        **options.settings(),
        # Ends the run at the first log-prob that differs in a single bit.
        "--true-on-policy-mode": None,
        "--rollout-engine": "embedded",
        "--colocate": None,
        "--apply-chat-template": None,
        "--rm-type": "math",
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 64,
        "--run-dir": options.work / "run",
    }
    if options.model is None:
        task = quickstart_task(options.work.parent, options.sft_steps)
        flags |= {
            "--hf-checkpoint": task.sft_model,
            "--prompt-data": task.prompts,
            "--input-key": "messages",
            "--label-key": "label",
            "--num-rollout": 10,
            "--rollout-max-response-len": 32,
            "--lr": 4e-4,
        }
    else:
        flags |= {"--hf-checkpoint": options.model, **FOR_A_MODEL}
    slime("train", flags, options.flags)
    lines = [json.loads(line) for line in (options.work / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if DIFFERENCE in line:
            print(f"optimizer step {line['train/step']}: |trainer - engine| log-prob {line[DIFFERENCE]}")


if __name__ == "__main__":
    main()
