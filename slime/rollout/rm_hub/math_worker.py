"""The grader process: reads {"truth", "answer"} lines, answers {"equal", "error"} lines.

It may hang or grow without bound on hostile input; its parent kills it then, and its memory is limited. Only LaTeX is
parsed: math-verify's reading of plain expressions goes through sympy's `parse_expr`, which evaluates text as Python.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys

MEMORY_LIMIT = 2 << 30
PR_SET_PDEATHSIG = 1


def compare(truth: str, answer: str) -> bool:
    """Whether math-verify takes two answers as equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig()]

    def read(text: str) -> list:
        return parse(f"\\boxed{{{_as_latex(text)}}}", config, fallback_mode="no_fallback", parsing_timeout=None)

    gold, found = read(truth), read(answer)
    return bool(gold and found) and verify(gold, found, timeout_seconds=None)


def _as_latex(text: str) -> str:
    """Plain spellings of what LaTeX writes with commands."""
    text = text.strip().strip("$")
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])(pi|infty|sin|cos|tan|log|ln|exp)(?![a-zA-Z])", r"\\\1", text)
    return text.replace("**", "^").replace("π", "\\pi ").replace("√", "\\sqrt ").replace("∞", "\\infty ")


def _confine() -> None:
    """Die with the parent; never take more memory than the limit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    _confine()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logging.disable(logging.CRITICAL)
    compare("1", "2")
    replies.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"equal": compare(request["truth"], request["answer"]), "error": None}
        except (Exception, RecursionError, MemoryError) as error:
            reply = {"equal": False, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
