"""GRPO with generation that never stops: engines go on through weight updates, the trainer takes what has finished."""

from __future__ import annotations

from collections.abc import Sequence

from examples.common.launch import parse, slime
from examples.common.tiny import quickstart_task

SFT_STEPS = 180


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("fully_async", __doc__, argv, SFT_STEPS)
    flags: dict[str, object] = {
        **options.settings(),
        "--rollout-function-path": "slime.rollout.fully_async_rollout.generate_rollout",
        "--rollout-num-gpus": 1,
        "--max-weight-staleness": 2,
        "--over-sampling-batch-size": 48,
        "--rollout-batch-size": 32,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 256,
        "--use-tis": None,
        "--num-rollout": 20,
        "--run-dir": options.work / "run",
    }
    if options.model is None:
        task = quickstart_task(options.work.parent, options.sft_steps)
        flags |= {
            "--hf-checkpoint": task.sft_model,
            "--prompt-data": task.prompts,
            "--input-key": "messages",
            "--label-key": "label",
            "--apply-chat-template": None,
            "--rm-type": "math",
            "--rollout-max-response-len": 32,
            "--lr": 4e-4,
            "--lr-warmup-iters": 3,
        }
    else:
        flags["--hf-checkpoint"] = options.model
    slime("train-async", flags, options.flags)


if __name__ == "__main__":
    main()
