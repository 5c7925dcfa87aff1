"""Math grading: real GSM8K answers in many spellings, algebra, and input that wants to hang or crash the grader."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import math_grader as benchmark
from slime.rollout.rm_hub import async_rm, math_grader
from slime.rollout.rm_hub.math_answers import candidates, cheap_equal, last_boxed
from slime.rollout.rm_hub.math_grader import GraderPool
from slime.utils.types import Sample
from tests.rollout.support import make_args

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "test.jsonl"


@pytest.fixture(scope="module")
def pool():
    pool = GraderPool(1)
    yield pool
    pool.close()


async def grade(response, label, rm_type="math", **args):
    sample = Sample(index=0, group_index=0, response=response, label=label)
    return await async_rm(make_args(rm_type=rm_type, **args), sample), sample.metadata


@pytest.mark.unit
@pytest.mark.parametrize(
    "text, expected",
    [
        ("a \\boxed{1} b \\boxed{2} c", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\fbox{x}", "x"),
        ("\\boxed 7.", "7"),
        ("\\boxed{1", None),
        ("none", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.unit
@pytest.mark.parametrize(
    "response, expected",
    [
        ("Work.\n#### 1,234", ["1,234"]),
        ("The answer is 18.", ["18"]),
        ("So the answer is $18 per day, because ducks.", None),
        ("First 5, then 7 apples are left.", ["7"]),
        ("answer: 12\nno, the answer is 13.\n", ["13"]),
        ("the answer is 20 - 2 = 18", ["20 - 2 = 18", "18"]),
        ("nothing at all", []),
        ("The answer is **18**, as each of 3 boxes counts.", ["18"]),
        ("The answer is -\\$18.", ["-\\$18"]),
        ("#### 3e1", ["3e1"]),
    ],
)
def test_candidates(response, expected):
    found = candidates(response)
    assert found == expected if expected is not None else "18" in found[-1]


@pytest.mark.unit
@pytest.mark.parametrize(
    "truth, answer",
    [
        ("18", "$18"), ("18", "18.00"), ("1234", "1,234"), ("1234", "1{,}234"), ("1234", "1\\,234"),
        ("1/2", "\\frac{1}{2}"), ("0.5", "\\dfrac12"), ("3/2", "1\\frac{1}{2}"), ("3/2", "1 1/2"),
        ("50", "50\\%"), ("0.5", "50%"), ("18", "\\$18"), ("18", "18 dollars"), ("18", "18\\text{ km/h}"),
        ("-5", "\u22125"), ("18", "x = 18"), ("1500000", "1.5 million"), ("9", "9\\text{ cm}^2"),
        ("90", "90^\\circ"), ("300", "3 \\times 10^2"), ("0.003", "3x10^{-3}"), ("1234567", "1\\,234\\,567"),
        ("18", "\\left(18\\right)"), ("-18", "-\\$18"), ("1500", "1.5e3"),
        ("C", "\\text{C}"), ("Yes", "yes"), ("5", "5 m"), ("1/3", "0.3333333"),
    ],
)  # fmt: skip
def test_plain_spellings_of_the_same(truth, answer):
    assert cheap_equal(truth, answer) is True


@pytest.mark.unit
@pytest.mark.parametrize(
    "truth, answer",
    [
        ("18", "19"), ("18", "118"), ("18", "1.8"), ("1234", "1,235"), ("1/2", "\\frac{1}{3}"),
        ("50", "0.5"), ("5", "-5"), ("18", "eighteen"), ("3", "3 thousand"), ("18", ""), ("50%", "0.5%"),
        ("100001", "100000"), ("3", "3 \\times 10^1"), ("18", "-\\$18"), ("3", "3e1"),
    ],
)  # fmt: skip
def test_plain_spellings_of_something_else(truth, answer):
    assert cheap_equal(truth, answer) is False


@pytest.mark.unit
@pytest.mark.parametrize("answer", ["2pi", "2x", "2 or 4", "2 and a half", "2, 4", "2^3", "2 times"])
def test_what_only_looks_like_a_number_is_not_decided_cheaply(answer):
    assert cheap_equal("2", answer) is not True


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(benchmark.FORMATS))
async def test_gsm8k_answers_in_ten_formats(name):
    labels = [json.loads(line)["answer"] for line in GSM8K.open(encoding="utf-8")][::80]
    listed = list(benchmark.cases(labels, name))
    rewards = await benchmark.grade_all(listed)
    wrong = [case for case, reward in zip(listed, rewards, strict=True) if bool(reward) != case[2]]
    assert wrong == [] and sum(right for _, _, right in listed) > 60


@pytest.mark.integration
@pytest.mark.parametrize(
    "truth, answer, equal",
    [
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("(1,2)", "(1, 2)", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("\\pi", "pi", True),
        ("2\\sqrt{3}", "sqrt(12)", True),
        ("100", "10^2", True),
        ("2", "2pi", False),
        ("3", "3x", False),
        ("[0,1)", "[0,1]", False),
        ("x^2", "x^3", False),
        ("3", "3 or 4", False),
    ],
)
def test_algebra(pool, truth, answer, equal):
    assert pool.grade(truth, answer, 20) == (equal, None)


@pytest.mark.integration
async def test_end_to_end_types():
    assert (await grade("thus \\boxed{\\sqrt{8}}", "2\\sqrt{2}"))[0] == 1.0
    assert (await grade("<think>\\boxed{5}</think> \\boxed{6}", "6", "deepscaler"))[0] == 1.0
    assert (await grade("<think>\\boxed{6}", "6", "deepscaler"))[0] == 0.0
    assert (await grade("it is 6", "6", "boxed_math"))[0] == 0.0
    assert (await grade("it is \\boxed{6}", ["5", "6"]))[0] == 1.0


HOSTILE = {
    "power tower": "9^{9^{9^{9}}}",
    "nested parentheses": "(" * 900 + "1" + ")" * 900,
    "factorials": "9999999!!!",
    "import": "__import__('os').system('touch pwned')",
    "lambda": "(lambda: exit())()",
    "newlines": '1"}\n{"truth": "1", "answer": "1',
}


@pytest.mark.integration
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_cost_their_time_limit_and_no_more(pool, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pool.grade("2\\sqrt{5}", f"\\sqrt{{20}} + {len(name)} - {len(name)}", 20) == (True, None)
    started = time.monotonic()
    equal, _ = pool.grade("17", HOSTILE[name], 1.0)
    assert time.monotonic() - started < 10 and equal is False
    assert os.listdir(tmp_path) == []


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(benchmark.HOSTILE))
async def test_hostile_responses_get_nothing_in_time(name):
    math_grader.pool().grade("x", f"y + {len(name)}", 60.0)  # a worker runs
    started = time.monotonic()
    reward, _ = await grade(benchmark.HOSTILE[name], "17", rm_timeout_secs=0.5)
    assert reward == 0.0 and time.monotonic() - started < 10


@pytest.mark.integration
async def test_a_timed_out_grade_is_recorded():
    reward, metadata = await grade("\\boxed{9^{9^{9^{9}}}}", "17", rm_timeout_secs=0.5)
    assert reward == 0.0 and "took longer than 0.5 s" in metadata["grade_error"]


@pytest.mark.unit
@pytest.mark.parametrize("unit", ["\\boxed{", "}", "answer is ", "#### ", "1,", "1 ", "$", "(", "\\frac{1}", "\n"])
async def test_a_megabyte_of_anything_is_quick(unit):
    started = time.process_time()
    await grade(unit * (1_000_000 // len(unit)), "17")
    assert time.process_time() - started < 2


@pytest.mark.integration
def test_a_killed_worker_is_replaced(pool):
    pool.grade("a", "b", 20)
    worker = pool._slots.queue[-1]
    os.kill(worker.process.pid, signal.SIGKILL)
    assert pool.grade("3\\sqrt{2}", "\\sqrt{18}", 20) == (True, None)


@pytest.mark.integration
def test_workers_end_with_their_parent():
    import subprocess
    import sys

    code = (
        "import os, signal\n"
        "from slime.rollout.rm_hub.math_grader import GraderPool\n"
        "pool = GraderPool(1); pool.grade('a', 'b', 20)\n"
        "print(pool._slots.queue[0].process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
