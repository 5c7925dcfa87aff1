"""Rewards on text: token F1 and multiple choice."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from slime.rollout.rm_hub.math_answers import last_boxed

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICTS = ("yes", "no", "noanswer")
_TAIL = 4000


def normalize_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD, arXiv:1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1_score(prediction: str, label: str) -> float:
    """Harmonic mean of token precision and recall after normalisation; a yes/no answer must match as a whole."""
    guess, truth = normalize_answer(prediction), normalize_answer(label)
    if (guess in _VERDICTS or truth in _VERDICTS) and guess != truth:
        return 0.0
    guess_tokens, truth_tokens = guess.split(), truth.split()
    if not guess_tokens or not truth_tokens:
        return float(guess_tokens == truth_tokens)
    common = sum((Counter(guess_tokens) & Counter(truth_tokens)).values())
    return 2 * common / (len(guess_tokens) + len(truth_tokens))


def compute_gpqa_reward(response: str, label: str, metadata: dict[str, Any] | None = None) -> float:
    """1 when the chosen letter is the right one.

    `metadata` may hold `choices` (texts, or letter -> text), `correct_letter` and `valid_letters`. A label that is
    the text of a choice counts too.
    """
    metadata = metadata or {}
    choices = _choices(metadata.get("choices"))
    valid = "".join(metadata.get("valid_letters") or choices or "ABCDEFGH").upper()
    correct = str(metadata.get("correct_letter") or label).strip().strip("().").upper()
    if len(correct) != 1 or correct not in valid:
        wanted = normalize_answer(str(label))
        correct = next((letter for letter, text in choices.items() if normalize_answer(text) == wanted), "")
    answer = response.rsplit("</think>", 1)[-1]
    letter = extract_letter(answer, valid)
    if letter is not None and correct:
        return float(letter == correct)
    stated = normalize_answer(last_boxed(answer) or "")
    truth = normalize_answer(choices.get(correct, label))
    return float(bool(stated) and stated == truth)


def _choices(raw: Any) -> dict[str, str]:
    if isinstance(raw, dict):
        return {str(letter).upper(): str(text) for letter, text in raw.items()}
    return {chr(ord("A") + i): str(text) for i, text in enumerate(raw or [])}


def extract_letter(text: str, valid: str) -> str | None:
    """The letter that a response settles on: \\boxed{C}, "answer: (C)", or a last line that is only a letter."""
    boxed = last_boxed(text)
    letter = f"[{re.escape(valid)}]"
    if boxed is not None:
        content = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{", "", boxed).strip("{} ().*$")
        match = re.match(rf"({letter})(?![A-Za-z0-9])", content, re.IGNORECASE)
        return match.group(1).upper() if match else None
    tail = text[-_TAIL:]
    stated = re.findall(
        rf"(?i:answer|option|choice)(?i:\s+is)?\s*[:=]?\s*[*$(\[]{{0,4}}\s*({letter})(?![A-Za-z0-9'])", tail
    )
    if stated:
        return stated[-1]
    lines = [line.strip(" .*()[]$") for line in tail.splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return last if len(last) == 1 and last in valid else None
