"""A model learns to compute with Python: it writes code, a sandbox runs it, the output comes back."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence

from examples.common.launch import parse, slime
from examples.common.tiny import SFT_BATCH, model_from_demonstrations, write_jsonl

SFT_STEPS = 160
OPERATORS = {"+": operator.add, "-": operator.sub}
MEANING = {"blick": "-", "dax": "+"}
"""What the words mean."""
RIGHT = 2 / 3
"""How often demonstrations know it: what raises accuracy further is the reward."""


def problem(rng: random.Random) -> tuple[str, str, int, int]:
    """(question, word, first number, second number)"""
    word, a, b = rng.choice(sorted(MEANING)), rng.randint(21, 40), rng.randint(2, 20)
    return f"What is {a} {word} {b}?", word, a, b


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    question, word, a, b = problem(rng)
    wrong = next(sign for sign in OPERATORS if sign != MEANING[word])
    sign = MEANING[word] if rng.random() < RIGHT else wrong
    result = OPERATORS[sign](a, b)
    answer = f"<code>print({a} {sign} {b})</code>\n<output>{result}</output>\n#### {result}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def prompt(rng: random.Random) -> dict[str, object]:
    question, word, a, b = problem(rng)
    return {"messages": [{"role": "user", "content": question}], "label": str(OPERATORS[MEANING[word]](a, b))}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse("retool", __doc__, argv, SFT_STEPS)
    rng = random.Random(0)
    flags: dict[str, object] = {
        **options.settings(),
        "--colocate": None,
        "--custom-generate-function-path": "examples.retool.generate.generate",
        "--rm-type": "math",
        "--log-multi-turn": None,
        "--rollout-batch-size": 32,
        "--n-samples-per-prompt": 8,
        "--global-batch-size": 256,
        "--num-rollout": 30,
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
