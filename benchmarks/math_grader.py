"""The math grader over all GSM8K test answers, each written in ten formats, right and wrong; and over hostile input.

A right answer that gets 0 is a false negative, a wrong one that gets 1 a false positive. Wrong responses mention the
right number on their way, as real ones do. Hostile input must cost no more than the time limit.

    python benchmarks/math_grader.py
    python benchmarks/math_grader.py --rows 50 --no-write
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import describe, write_result  # noqa: E402
from slime.rollout.rm_hub.math_answers import candidates, cheap_equal, label_answer  # noqa: E402
from slime.rollout.rm_hub.math_grader import grade_math, pool  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

GSM8K = ROOT / "data" / "gsm8k" / "test.jsonl"
REASONING = "There are 3 boxes with 7 each. At first it looks like {truth}, but on day 2 that changes.\n"
LIMIT_SECONDS = 2.0
CHUNK = 512


def scientific(value: int) -> tuple[str, int]:
    """(mantissa, exponent) of a whole number."""
    digits = str(abs(value))
    mantissa = (digits[0] + "." + digits[1:]).rstrip("0").rstrip(".")
    return ("-" if value < 0 else "") + mantissa, len(digits) - 1


def boxed(v: int) -> list[str]:
    return [
        f"So we get $\\boxed{{{v}}}$.",
        f"\\boxed{{ {v}.00 }}",
        f"$$\\boxed{{x = {v}}}$$",
        f"**Answer:** \\boxed{{\\text{{{v}}}}}",
    ]


def fractions(v: int) -> list[str]:
    return [
        f"\\boxed{{\\frac{{{4 * v}}}{{4}}}}",
        f"\\boxed{{\\dfrac{{{2 * v}}}2}}",
        f"The answer is {3 * v}/3.",
        f"The answer is $-\\frac{{{-2 * v}}}{{2}}$." if v < 0 else f"The answer is $\\tfrac{{{2 * v}}}{{2}}$.",
    ]


def commas(v: int) -> list[str]:
    grouped = f"{v:,}"
    latex, thin = grouped.replace(",", "{,}"), grouped.replace(",", "\\,")
    return [f"#### {grouped}", f"\\boxed{{{latex}}}", f"\\boxed{{{thin}}}", f"The total is {grouped}."]


def units(v: int) -> list[str]:
    return [
        f"\\boxed{{{v}\\text{{ apples}}}}",
        f"\\boxed{{{v:,}\\ \\mathrm{{km/h}}}}",
        f"The answer is {v} square feet.",
        f"Therefore it takes {v} hours",
        f"\\boxed{{{v}\\text{{ cm}}^2}}",
    ]


def latex(v: int) -> list[str]:
    return [
        f"The answer is \\( {v} \\).",
        f"\\[ x = \\boxed{{\\mathbf{{{v}}}}} \\]",
        f"\\boxed{{\\left({v}\\right)}}",
        f"Final answer: $\\displaystyle {v}$",
        f"\\boxed{{${v}$}}",
    ]


def trailing_text(v: int) -> list[str]:
    return [
        f"\\boxed{{{v}}}. This follows since 5 + 4 = 9, as 2 of us checked.",
        f"The answer is {v}. Let me know if you want to see 2 other ways!",
        f"#### {v}\n\nHope that helps! There are 12 more problems.",
        f"The final answer is **{v}**, since each of the 3 boxes counts.",
        f"Answer: {v}\n\nNote: we assumed 7 days.",
    ]


def percent(v: int) -> list[str]:
    return [f"\\boxed{{{v}\\%}}", f"The answer is {v}%.", f"It grew by {v} percent", f"#### {v}.0%"]


def currency(v: int) -> list[str]:
    sign, size = ("-", -v) if v < 0 else ("", v)
    return [
        f"\\boxed{{{sign}\\${size:,}}}",
        f"She has {sign}${size:,}.00 left.",
        f"The answer is {sign}\\${size}.",
        f"\\boxed{{{v} \\text{{ dollars}}}}",
        f"#### {sign}€{size}",
        f"The answer is {v} USD",
    ]


def mixed_numbers(v: int) -> list[str]:
    """The label of these is the value and a half."""
    return [f"\\boxed{{{v}\\frac{{1}}{{2}}}}", f"The answer is {v} 1/2.", f"#### {v}.5", f"\\boxed{{{v}\\ 3/6}}"]


def scientific_notation(v: int) -> list[str]:
    mantissa, exponent = scientific(v)
    return [
        f"\\boxed{{{mantissa} \\times 10^{{{exponent}}}}}",
        f"\\boxed{{{mantissa}\\cdot10^{exponent}}}",
        f"#### {mantissa}e{exponent}",
        f"The answer is {mantissa}E+{exponent:02d}.",
        f"The answer is {mantissa} × 10^{exponent}.",
    ]


FORMATS: dict[str, Callable[[int], list[str]]] = {
    "boxed": boxed,
    "fractions": fractions,
    "commas": commas,
    "units": units,
    "LaTeX": latex,
    "trailing text": trailing_text,
    "percent": percent,
    "currency": currency,
    "mixed numbers": mixed_numbers,
    "scientific notation": scientific_notation,
}


def wrong_values(value: int) -> list[int]:
    """Near misses: one off, a digit too many, a digit too few, the other sign."""
    near = {value + 1, value - 1, value * 10, value // 10, -value, value + 1000, int(str(abs(value))[::-1])}
    return sorted(near - {value})


def cases(labels: list[str], name: str) -> Iterator[tuple[str, str, bool]]:
    """(label, response, right) of one format over all labels."""
    for label in labels:
        value = int(label_answer(label).replace(",", ""))
        mixed = name == "mixed numbers"
        truth = f"{2 * value + 1}/2" if mixed else label
        shown = f"{value}.5" if mixed else str(value)
        for candidate in [value, *wrong_values(value)]:
            if mixed and (candidate < 0 or value < 0):
                continue
            for spelled in FORMATS[name](candidate):
                yield truth, REASONING.format(truth=shown) + spelled, candidate == value


async def grade_all(listed: list[tuple[str, str, bool]]) -> list[float]:
    args = argparse.Namespace(rm_timeout_secs=60.0)
    rewards: list[float] = []
    for start in range(0, len(listed), CHUNK):
        calls = [
            grade_math(args, Sample(index=0, label=label), response)
            for label, response, _ in listed[start : start + CHUNK]
        ]
        rewards += await asyncio.gather(*calls)
    return rewards


def decided_cheaply(label: str, response: str) -> bool:
    found = candidates(response)
    return bool(found) and cheap_equal(label_answer(label), found[0]) is not None


def run_formats(labels: list[str], show: int) -> dict[str, dict]:
    """Per format: responses, false negatives, false positives, share that needs no algebra, microseconds per grade."""
    table = {}
    for name in FORMATS:
        listed = list(cases(labels, name))
        started = time.perf_counter()
        rewards = asyncio.run(grade_all(listed))
        seconds = time.perf_counter() - started
        failed = [case for case, reward in zip(listed, rewards, strict=True) if bool(reward) != case[2]]
        for label, response, right in failed[:show]:
            print(f"  {'false negative' if right else 'false positive'}: label {label[-20:]!r}, {response[80:]!r}")
        table[name] = {
            "right": sum(right for _, _, right in listed),
            "wrong": sum(not right for _, _, right in listed),
            "false_negatives": sum(right for _, _, right in failed),
            "false_positives": sum(not right for _, _, right in failed),
            "without_algebra": round(sum(decided_cheaply(a, b) for a, b, _ in listed) / len(listed), 4),
            "microseconds": round(1e6 * seconds / len(listed), 1),
        }
        print(f"{name:20}", *(f"{key} {value}" for key, value in table[name].items()), flush=True)
    return table


HOSTILE = {
    "power tower": "\\boxed{9^{9^{9^{9}}}}",
    "huge power": "\\boxed{99999^{99999999}}",
    "huge exponent": "\\boxed{1e999999999}",
    "scientific with a huge exponent": "\\boxed{1 \\times 10^{999999999999}}",
    "nested parentheses": "\\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 300 + "2" + "}" * 300 + "}",
    "nested roots": "\\boxed{" + "\\sqrt{" * 300 + "2" + "}" * 300 + "}",
    "factorials": "\\boxed{99999999!!!}",
    "long sum": "\\boxed{" + "+".join(["x^2"] * 450) + "}",
    "large matrix": "\\boxed{\\begin{pmatrix}" + "1&" * 400 + "1\\end{pmatrix}}",
    "polynomial to expand": "\\boxed{(a+b+c+d+e)^{60}}",
    "integral": "\\boxed{\\int_0^1 e^{e^{e^{x}}} \\sin(x^x) dx}",
    "python": "\\boxed{__import__('os').system('sleep 100')}",
    "null bytes": "\\boxed{\x00\x00}",
    "lone surrogate": "\\boxed{\ud800}",
    "a megabyte of digits": "\\boxed{" + "7" * 1_000_000 + "}",
    "a megabyte of braces": "\\boxed{" * 140_000,
    "a megabyte of closing braces": "\\boxed{1" + "}" * 1_000_000,
    "a megabyte of spaces": "the answer is" + " " * 1_000_000 + "5",
    "a megabyte of answers": "answer is " * 100_000,
    "a megabyte of hashes": "#### " * 200_000,
    "a megabyte of dollars": "answer: " + "$" * 1_000_000,
    "a megabyte of commas": "1," * 500_000,
    "a megabyte of slashes": "1/" * 500_000,
    "a megabyte of backslashes": "answer is \\(" + "\\" * 1_000_000,
}


def run_hostile() -> dict[str, float]:
    """Seconds of each hostile response. All must get 0 within the limit (and the restart of a killed worker)."""
    args = argparse.Namespace(rm_timeout_secs=LIMIT_SECONDS)
    seconds = {}
    for name, response in HOSTILE.items():
        pool().grade("x", f"y + {len(seconds)}", 60.0)  # a worker runs: its start is not what is measured
        started = time.perf_counter()
        reward = asyncio.run(grade_math(args, Sample(index=0, label="17"), response))
        seconds[name] = round(time.perf_counter() - started, 3)
        if reward != 0.0:
            sys.exit(f"{name}: reward {reward}")
        print(f"{name:32} {seconds[name]:.3f} s", flush=True)
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="only the first N rows")
    parser.add_argument("--show", type=int, default=3, help="failures printed per format")
    parser.add_argument("--no-write", action="store_true", help="write no result file")
    args = parser.parse_args(argv)
    with GSM8K.open(encoding="utf-8") as file:
        labels = [json.loads(line)["answer"] for line in file][: args.rows]
    started = time.perf_counter()
    formats = run_formats(labels, args.show)
    hostile = run_hostile()
    failures = sum(row["false_negatives"] + row["false_positives"] for row in formats.values())
    slowest = max(hostile.values())
    result = {
        "rows": len(labels),
        "graded": sum(row["right"] + row["wrong"] for row in formats.values()),
        "failures": failures,
        "formats": formats,
        "hostile": {"limit_seconds": LIMIT_SECONDS, "slowest_seconds": slowest, "seconds": hostile},
        "caller_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "seconds": round(time.perf_counter() - started, 1),
        "machine": describe("math-verify", "sympy"),
    }
    print(f"{result['graded']} graded, {failures} wrong verdicts; hostile input at most {slowest:.2f} s")
    if not args.no_write:
        print(write_result("math-grader", result))
    return int(failures > 0 or slowest > LIMIT_SECONDS + 1)


if __name__ == "__main__":
    sys.exit(main())
