"""Grading of mathematical answers: plain comparison first, then math-verify in worker processes that can be killed.

A worker whose grade takes too long is killed and replaced. The sample gets 0, and `metadata["grade_error"]` says why:
a timeout is never a silent 0.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from slime.rollout.errors import RewardError
from slime.rollout.rm_hub.math_answers import candidates, cheap_equal, label_answer
from slime.utils.types import Sample

GRADE_SECONDS = 5.0
"""Time limit of one comparison by math-verify."""
START_SECONDS = 120.0
"""Time limit of starting a worker (it imports sympy)."""
MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong without being looked at."""
CACHE_ENTRIES = 4096
WORKER_SCRIPT = os.path.join(os.path.dirname(__file__), "math_worker.py")
"""Run by path: the worker then imports math-verify and nothing of slime."""


async def grade_math(args, sample: Sample, response: str) -> float:
    """1.0 when the final answer in `response` equals the sample's label (or one of its labels), else 0.0."""
    if sample.label is None:
        raise RewardError.about(sample, "--rm-type math", "needs a label: pass --label-key")
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    truths = [label_answer(str(label)) for label in labels]
    answers = [answer for answer in candidates(response) if len(answer) <= MAX_ANSWER_CHARS]
    errors = []
    for answer in answers:
        for truth in truths:
            equal = cheap_equal(truth, answer)
            if equal is None:
                limit = min(GRADE_SECONDS, args.rm_timeout_secs)
                equal, error = await pool().grade_async(truth, answer, limit)
                errors += [error] if error else []
            if equal:
                return 1.0
    if errors:
        sample.metadata["grade_error"] = "; ".join(errors)
    return 0.0


class GraderPool:
    """Worker processes for comparisons of any cost. Thread-safe; workers start when they are first needed."""

    def __init__(self, size: int | None = None) -> None:
        self.pid = os.getpid()
        self.size = size or max(1, min(4, (os.cpu_count() or 2) // 2))
        self._slots: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(self.size):
            self._slots.put(_Worker())
        self._executor = ThreadPoolExecutor(self.size, thread_name_prefix="math-grader")
        self._cache: dict[tuple[str, str], bool] = {}

    async def grade_async(self, truth: str, answer: str, limit: float) -> tuple[bool, str | None]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.grade, truth, answer, limit)

    def grade(self, truth: str, answer: str, limit: float) -> tuple[bool, str | None]:
        """(equal, None), or (False, why the comparison has no result)."""
        key = (truth, answer)
        if key in self._cache:
            return self._cache[key], None
        worker = self._slots.get()
        try:
            equal, error = worker.grade(truth, answer, limit)
        finally:
            self._slots.put(worker)
        if error is None:
            if len(self._cache) >= CACHE_ENTRIES:
                self._cache.clear()
            self._cache[key] = equal
        return equal, error

    def close(self) -> None:
        """Kill the workers."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        while True:
            try:
                self._slots.get_nowait().kill()
            except queue.Empty:
                return


class _Worker:
    """One grader process and its pipes. Used by one thread at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.ready = False

    def grade(self, truth: str, answer: str, limit: float) -> tuple[bool, str | None]:
        request = json.dumps({"truth": truth, "answer": answer}).encode() + b"\n"
        for _ in range(2):  # a worker may have died while it was idle
            try:
                return self.ask(request, limit)
            except TimeoutError:
                self.kill()
                self.spawn()  # it starts while nothing waits for it
                return False, f"grading took longer than {limit:g} s"
            except (OSError, EOFError, ValueError):
                self.kill()
        return False, "the grader process died"

    def ask(self, request: bytes, limit: float) -> tuple[bool, str | None]:
        if self.process is None or self.process.poll() is not None:
            self.spawn()
        if not self.ready:
            self.wait_until_ready()
        self.process.stdin.write(request)
        self.process.stdin.flush()
        reply = json.loads(self.read_line(limit))
        return reply["equal"], reply["error"]

    def spawn(self) -> None:
        self.kill()
        self.process = subprocess.Popen(
            [sys.executable, WORKER_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        try:
            self.read_line(START_SECONDS)
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise RuntimeError(f"the math grader does not start: {sys.executable} {WORKER_SCRIPT}") from error
        self.ready = True

    def read_line(self, limit: float) -> bytes:
        """One line of output. Replies are short, so a line arrives whole."""
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def kill(self) -> None:
        process, self.process, self.ready = self.process, None, False
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


_pool: GraderPool | None = None
_pool_lock = threading.Lock()


def pool() -> GraderPool:
    """The pool of this process."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool.pid != os.getpid():
            _pool = GraderPool()
            atexit.register(_pool.close)
        return _pool
