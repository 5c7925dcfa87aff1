"""Evaluate on several data sets at once, each with its own sampling, number of responses and reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.common.launch import parse, slime
from examples.common.tiny import quickstart_task

HERE = Path(__file__).parent
SFT_STEPS = 180


def write_config(path: Path, held_out: Path) -> Path:
    """The YAML of this folder with the paths of the tiny task."""
    path.write_text((HERE / "eval.yaml").read_text().replace("HELD_OUT", str(held_out)))
    return path


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("eval_multi_task", __doc__, argv, SFT_STEPS)
    flags: dict[str, object] = {
        **options.settings(),
        "--colocate": None,
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 128,
        "--num-rollout": 6,
        "--eval-interval": 3,
        "--log-passrate": None,
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
            "--eval-config": write_config(options.work / "eval.yaml", task.held_out),
        }
    else:
        flags["--hf-checkpoint"] = options.model
    slime("train", flags, options.flags)


if __name__ == "__main__":
    main()
