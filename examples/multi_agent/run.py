"""A solver and a checker with one policy, trained together on the reward of the final answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.common.launch import parse, slime
from examples.common.tiny import SFT_BATCH, model_from_demonstrations, write_jsonl

SFT_STEPS = 120
NUMBERS = range(2, 21)


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """A turn of the solver (right half of the time), of the checker, or of a second attempt."""
    a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
    question = {"role": "user", "content": f"What is {a} plus {b}?"}
    said = a + b + rng.choice([0, 0, 1, -1])
    answer = {"role": "assistant", "content": f"#### {said}"}
    kind = rng.choice(["solve", "check", "again"])
    if kind == "solve":
        return [question, answer]
    if kind == "check":
        asked = f"{question['content']} Is it right?\n{answer['content']}"
        verdict = "yes" if (said == a + b) == (rng.random() < 0.8) else "no"
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": verdict}]
    again = {"role": "assistant", "content": f"#### {a + b + rng.choice([0, 0, 1, -1])}"}
    return [question, {**answer, "step_loss_mask": 0}, {"role": "user", "content": "Try again."}, again]


def prompt(rng: random.Random) -> dict[str, object]:
    a, b = rng.choice(NUMBERS), rng.choice(NUMBERS)
    return {"messages": [{"role": "user", "content": f"What is {a} plus {b}?"}], "label": str(a + b)}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("multi_agent", __doc__, argv, SFT_STEPS)
    rng = random.Random(0)
    flags: dict[str, object] = {
        **options.settings(),
        "--colocate": None,
        "--custom-generate-function-path": "examples.multi_agent.generate.generate",
        "--rm-type": "math",
        "--log-multi-turn": None,
        "--rollout-batch-size": 16,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 128,
        "--num-rollout": 20,
        "--run-dir": options.work / "run",
    }
    if options.model is None:
        demonstrations = [demonstration(rng) for _ in range(options.sft_steps * SFT_BATCH)]
        flags |= {
            "--hf-checkpoint": model_from_demonstrations(options.work, demonstrations),
            "--prompt-data": write_jsonl(options.work / "prompts.jsonl", (prompt(rng) for _ in range(512))),
            "--input-key": "messages",
            "--label-key": "label",
            "--rollout-max-response-len": 16,
            "--lr": 4e-4,
        }
    else:
        flags["--hf-checkpoint"] = options.model
    slime("train", flags, options.flags)


if __name__ == "__main__":
    main()
