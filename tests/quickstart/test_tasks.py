"""Problems are solved again from their words alone; nothing held out is ever trained on."""

import re

import pytest

from slime.quickstart.tasks import KNOWN_VERBS, Task
from slime.quickstart.tokenizer import train_tokenizer

pytestmark = pytest.mark.unit


def events(question: str) -> tuple[int, list[tuple[str, int]]]:
    """Start number, then (verb, amount) of each event, read off the words."""
    story, *parts, _ = re.split(r"(?<=[.?]) ", question)
    start = int(re.search(r"\d+", story).group())
    found = [re.search(r"(\w+) (\d+)", part) for part in parts]
    return start, [(match[1], int(match[2])) for match in found]


@pytest.mark.parametrize("seed", range(4))
def test_answers_follow_from_the_words(seed):
    task = Task.make(seed)
    guesses = right = 0
    for problem in task.problems(task.train, 400, "test"):
        start, happened = events(problem.question)
        signs = [1 if task.meaning[verb] == "+" else -1 for verb, _ in happened]
        assert int(problem.answer) == start + sum(s * n for s, (_, n) in zip(signs, happened, strict=True)) >= 0
        # The demonstration computes correctly, and known verbs are read correctly.
        steps = re.findall(r"(\w+) (\d+): (\d+) ([+-]) (\d+) = (\d+)", problem.demonstration)
        assert [(verb, int(n)) for verb, n, *_ in steps] == happened
        value = start
        for verb, n, before, sign, amount, after in steps:
            assert int(before) == value and n == amount
            value += int(amount) if sign == "+" else -int(amount)
            assert int(after) == value
            if verb in KNOWN_VERBS:
                assert sign == KNOWN_VERBS[verb]
            else:
                guesses += 1
                right += sign == task.meaning[verb]
        assert problem.demonstration.endswith(f"#### {value}")
    assert 0.4 < right / guesses < 0.6, "demonstrations must not know what the made-up verbs mean"


@pytest.mark.parametrize("seed", range(4))
def test_held_out_calculations_are_never_trained_on(seed):
    task = Task.make(seed)
    assert {c.numbers for c in task.train}.isdisjoint(c.numbers for c in task.held_out)
    assert len(task.held_out) >= 0.2 * (len(task.train) + len(task.held_out))
    trained_steps = {step for c in task.train for step in c.steps}
    assert all(step in trained_steps for c in task.held_out for step in c.steps)


def test_problems_depend_on_seed_and_purpose_alone():
    def questions(seed, purpose):
        task = Task.make(seed)
        return [p.question for p in task.problems(task.train, 20, purpose)]

    assert questions(1, "a") == questions(1, "a")
    assert questions(1, "a") != questions(1, "b") != questions(2, "b")


def test_tokenizer_loses_nothing():
    task = Task.make(0)
    problems = list(task.problems(task.train, 300, "tokenizer"))
    tokenizer = train_tokenizer(text for p in problems for text in (p.question, p.demonstration))
    for problem in problems[:50]:
        ids = tokenizer(problem.demonstration)["input_ids"]
        assert tokenizer.decode(ids) == problem.demonstration and len(ids) < 32
    messages = problems[0].demonstration_row()["messages"]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered.count("<|im_end|>") == 2 and tokenizer.eos_token == "<|im_end|>"
