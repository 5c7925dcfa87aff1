"""Train twice and compare: the same samples token by token, the same weights bit by bit."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.common.launch import parse, slime
from examples.common.tiny import quickstart_task

SFT_STEPS = 180
ROLLOUTS = 4


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compare(runs: list[Path]) -> list[str]:
    """What differs between two runs; empty when nothing does."""
    differences = []
    for folder, pattern in (("samples", "*.jsonl"), ("weights", "*/*.safetensors")):
        names = [sorted(str(p.relative_to(run / folder)) for p in (run / folder).glob(pattern)) for run in runs]
        if names[0] != names[1] or not names[0]:
            differences.append(f"{folder}: {names[0]} against {names[1]}")
            continue
        for name in names[0]:
            first, second = (digest(run / folder / name) for run in runs)
            print(f"{folder}/{name}  {first[:16]}  {'=' if first == second else '!='}  {second[:16]}")
            if first != second:
                differences.append(f"{folder}/{name}")
    return differences


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("reproducibility", __doc__, argv, SFT_STEPS)
    flags: dict[str, object] = {
        **options.settings(),
        "--colocate": None,
        "--deterministic-mode": None,
        "--seed": 7,
        "--rollout-seed": 7,
        "--rollout-shuffle": None,
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 4,
        "--global-batch-size": 32,
        "--num-rollout": ROLLOUTS,
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
        }
    else:
        flags["--hf-checkpoint"] = options.model
    runs = [options.work / name for name in ("first", "second")]
    for run in runs:
        saved = {"--save": run / "checkpoints", "--save-hf": run / "weights" / "{rollout_id}", "--run-dir": run}
        slime("train", {**flags, **saved}, options.flags)
    differences = compare(runs)
    print("bit-equal" if not differences else "different: " + ", ".join(differences))
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
