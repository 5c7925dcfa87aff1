"""Arithmetic word problems with checkable answers: the task of the quickstart.

Most verbs are made up ("Mia blicks 3 apples"), and each of those secretly means gaining or losing. The demonstrations
for SFT do not know what they mean and guess, every guess a fair coin. Whatever imitates them guesses too, so what
raises accuracy afterwards can only be the reward. Train and held-out problems are split by their numbers: no held-out
calculation is ever trained on, whatever words tell it and however its signs are read.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

NAMES = "Ada Ben Eva Ivy Leo Max Mia Noa Sam Tom Uma Zoe".split()
ITEMS = "apples beads books cards coins cups eggs keys nuts pears pens stamps".split()
KNOWN_VERBS = {"buys": "+", "sells": "-"}
MADE_UP_VERBS = "blicks daxes florps glemps plonks wugs".split()
STARTS = range(7, 11)
AMOUNTS = range(1, 5)
STORIES = ["{name} has {n} {items}.", "{name} owns {n} {items}.", "There are {n} {items} in the box of {name}."]
EVENTS = [
    "{name} {verb} {n} {items}.",
    "{name} {verb} {n}.",
    "Then {name} {verb} {n} of them.",
    "Later {name} {verb} {n}.",
]
QUESTIONS = ["How many {items} are there now?", "How many {items} is that?", "How many does {name} have now?"]
HELD_OUT_SHARE = 0.25


@dataclass(frozen=True)
class Calculation:
    """A start number and two signed amounts: (7, (-3, +2)) is 7 - 3 + 2."""

    start: int
    amounts: tuple[int, int]

    @property
    def values(self) -> list[int]:
        """The running value: start, after the first amount, the answer."""
        first, second = self.amounts
        return [self.start, self.start + first, self.start + first + second]

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The calculation without its signs."""
        return self.start, abs(self.amounts[0]), abs(self.amounts[1])

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(value, amount) of both additions."""
        return list(zip(self.values, self.amounts, strict=False))


@dataclass(frozen=True)
class Problem:
    """A word problem, a demonstration in the answer format of GSM8K (`#### answer`), and the right answer."""

    question: str
    demonstration: str
    answer: str

    def demonstration_row(self) -> dict:
        """A row for SFT: the whole conversation."""
        return {"messages": [self._user(), {"role": "assistant", "content": self.demonstration}]}

    def prompt_row(self) -> dict:
        """A row for RL and evaluation: the question as a conversation, and the answer to check against."""
        return {"messages": [self._user()], "label": self.answer}

    def _user(self) -> dict:
        return {"role": "user", "content": self.question}


def calculations() -> list[Calculation]:
    """Every calculation with amounts that differ, so that the four ways to read their signs give four answers.

    No reading goes below 0.
    """
    return [
        Calculation(start, (sign_a * a, sign_b * b))
        for start, a, b in product(STARTS, AMOUNTS, AMOUNTS)
        for sign_a, sign_b in product((1, -1), repeat=2)
        if a != b
    ]


def write_out(calculation: Calculation, verbs: list[str]) -> str:
    """`First blicks 4: 7 + 4 = 11, then wugs 3: 11 - 3 = 8.`, and the answer line."""
    steps = [
        f"{verb} {abs(amount)}: {value} {'+' if amount > 0 else '-'} {abs(amount)} = {value + amount}"
        for verb, (value, amount) in zip(verbs, calculation.steps, strict=True)
    ]
    return f"First {', then '.join(steps)}.\n#### {calculation.values[-1]}"


def split(every: list[Calculation], rng: random.Random) -> tuple[list[Calculation], list[Calculation]]:
    """(train, held out) at random, by numbers: calculations that differ only in signs stay together.

    So no reading of a train problem, right or wrong, is a held-out calculation. Every single step of a held-out
    calculation is left in some train calculation.
    """
    together: dict[tuple[int, ...], list[Calculation]] = defaultdict(list)
    for calculation in every:
        together[calculation.numbers].append(calculation)
    left = Counter(step for calculation in every for step in calculation.steps)
    train, held_out = [], []
    for numbers in rng.sample(sorted(together), len(together)):
        group = together[numbers]
        steps = Counter(step for calculation in group for step in calculation.steps)
        if len(held_out) < HELD_OUT_SHARE * len(every) and all(left[step] > count for step, count in steps.items()):
            held_out += group
            left -= steps
        else:
            train += group
    return train, held_out


@dataclass(frozen=True)
class Task:
    """The problems of one seed: what the made-up verbs mean, and which calculations are held out."""

    seed: int
    meaning: dict[str, str]
    """"+" or "-" per verb, known and made up."""
    train: list[Calculation]
    held_out: list[Calculation]

    @classmethod
    def make(cls, seed: int) -> Task:
        rng = random.Random(f"task {seed}")
        words = rng.sample(MADE_UP_VERBS, len(MADE_UP_VERBS))
        meaning = KNOWN_VERBS | {word: "+-"[i % 2] for i, word in enumerate(words)}
        train, held_out = split(calculations(), rng)
        return cls(seed, meaning, train, held_out)

    def problems(self, pool: list[Calculation], count: int, purpose: str) -> Iterator[Problem]:
        """`count` problems over the calculations of `pool`, each used once before any is used again.

        `purpose` seeds the wording and the guesses: the same purpose gives the same problems.
        """
        rng = random.Random(f"{purpose} {self.seed}")
        order: list[Calculation] = []
        for _ in range(count):
            if not order:
                order = rng.sample(pool, len(pool))
            yield self.tell(order.pop(), rng)

    def tell(self, calculation: Calculation, rng: random.Random) -> Problem:
        """Dress a calculation in words; its demonstration guesses what the made-up verbs mean."""
        words = {"name": rng.choice(NAMES), "items": rng.choice(ITEMS)}
        signs = ["+" if amount > 0 else "-" for amount in calculation.amounts]
        verbs = [rng.choice([verb for verb, sign in self.meaning.items() if sign == wanted]) for wanted in signs]
        sentences = [rng.choice(STORIES).format(n=calculation.start, **words)]
        guessed = []
        for verb, amount in zip(verbs, calculation.amounts, strict=True):
            sentences.append(rng.choice(EVENTS).format(verb=verb, n=abs(amount), **words))
            guessed.append(amount if verb in KNOWN_VERBS else rng.choice((1, -1)) * amount)
        sentences.append(rng.choice(QUESTIONS).format(**words))
        demonstration = write_out(replace(calculation, amounts=tuple(guessed)), verbs)
        return Problem(" ".join(sentences), demonstration, str(calculation.values[-1]))
