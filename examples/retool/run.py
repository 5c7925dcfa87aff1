"""A model learns to compute with Python: it writes code, a sandbox runs it, the output comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.common.launch import parse, slime
from examples.common.tiny import SFT_BATCH, model_from_demonstrations, write_jsonl

SFT_STEPS = 120
MEANING = {"plus": "+", "blick": "*"}
"""What the words mean. The demonstrations know `plus` and guess `blick`: what raises accuracy is the reward."""
GUESSES = {"plus": "+", "blick": "+*"}


def problem(rng: random.Random) -> tuple[str, str, int, int]:
    """(question, word, first number, second number)"""
    word, a, b = rng.choice(sorted(MEANING)), rng.randint(11, 40), rng.randint(11, 40)
    return f"What is {a} {word} {b}?", word, a, b


def evaluate(operator: str, a: int, b: int) -> int:
    return a + b if operator == "+" else a * b


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    question, word, a, b = problem(rng)
    operator = rng.choice(GUESSES[word])
    result = evaluate(operator, a, b)
    answer = f"<code>print({a} {operator} {b})</code>\n<output>{result}</output>\n#### {result}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def prompt(rng: random.Random) -> dict[str, object]:
    question, word, a, b = problem(rng)
    return {"messages": [{"role": "user", "content": question}], "label": str(evaluate(MEANING[word], a, b))}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("retool", __doc__, argv, SFT_STEPS)
    rng = random.Random(0)
    flags: dict[str, object] = {
        **options.settings(),
        "--colocate": None,
        "--custom-generate-function-path": "examples.retool.generate.generate",
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
            "--apply-chat-template": None,
            "--rollout-max-response-len": 64,
            "--lr": 4e-4,
        }
    else:
        flags["--hf-checkpoint"] = options.model
    slime("train", flags, options.flags)


if __name__ == "__main__":
    main()
