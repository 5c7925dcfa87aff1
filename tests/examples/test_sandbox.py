"""The walls of the sandbox, tried from inside."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from examples.retool.sandbox import CHILD, Limits, run_python

pytestmark = pytest.mark.integration


def run(code, **limits):
    return asyncio.run(run_python(code, Limits(**limits)))


def test_it_computes_and_prints():
    result = run("import math\nfrom fractions import Fraction\nprint(math.factorial(20), Fraction(1, 3) + 1)")
    assert result.output == "2432902008176640000 4/3\n" and result.status == "ok"
    assert run("print(1)\nraise SystemExit").output == "1\n"


def test_an_error_is_told():
    result = run("print(1)\n1 / 0")
    assert result.output == "1\nZeroDivisionError: division by zero\n" and result.status == "error"
    assert run("def f(:").output.startswith("SyntaxError")


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "open('here.txt', 'w')",
        "import os; os.listdir('/')",
        "import os; os.stat('/etc')",
        "import socket; socket.create_connection(('127.0.0.1', 80), timeout=1)",
        "import _socket; _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)",
        "import os; os.fork()",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import posix; posix.kill(posix.getppid(), 9)",
        "import posix; posix.open('/proc/self/environ', 0)",
        "import ctypes; ctypes.CDLL(None).system(b'id') and exit()",
        "import _thread; _thread.start_new_thread(print, ())",
    ],
)
def test_no_files_no_network_no_processes(code):
    result = run(f"{code}\nprint('escaped')")
    assert "escaped" not in result.output and result.status != "timeout", result


def test_the_filter_is_the_wall_not_the_missing_modules():
    """With the modules at hand, the kernel refuses."""
    code = "import sys; posix = sys.modules['posix']\n{}\nprint('escaped')"
    for call in ("posix.open('/etc/passwd', 0)", "posix.mkdir('x')", "posix.fork()", "posix.pipe()"):
        assert "PermissionError" in run(code.format(call)).output, call


def test_nothing_of_the_parent_is_in_there(monkeypatch):
    monkeypatch.setenv("SECRET_OF_PARENT", "x")
    with open(__file__):
        result = run("import sys; os = sys.modules['os']; print(dict(os.environ))\nos.read(3, 10)")
    assert "SECRET" not in result.output and "Bad file descriptor" in result.output


@pytest.mark.parametrize(
    ("code", "limits", "status"),
    [
        ("while True: pass", {"cpu_seconds": 1, "wall_seconds": 10}, "killed"),
        ("import time; time.sleep(60)", {"wall_seconds": 0.5}, "timeout"),
        ("while True: print('x' * 1000)", {}, "output"),
        ("x = 'a' * (1 << 40)", {}, "error"),
        ("x = []\nwhile True: x.append(bytearray(10 ** 7))", {}, "error"),
        ("def f(): f()\nf()", {}, "error"),
    ],
)
def test_limits(code, limits, status):
    started = time.monotonic()
    result = run(code, **limits)
    assert result.status == status and len(result.output) <= 4096
    assert time.monotonic() - started < 15


def sandboxes():
    return [p for p in psutil.Process().children(recursive=True) if str(CHILD) in p.cmdline()]


def test_many_at_once_and_none_is_left():
    async def many():
        return await asyncio.gather(*(run_python(f"print({i})") for i in range(40)))

    assert [result.output for result in asyncio.run(many())] == [f"{i}\n" for i in range(40)]
    # Code that closes its output and stays is ended, too.
    code = "import sys, time; posix = sys.modules['posix']\nposix.close(0); posix.close(1); time.sleep(60)"
    assert run(code).status == "killed"
    deadline = time.monotonic() + 10
    while len(sandboxes()) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(sandboxes()) == 1, "the one that forks"


def test_it_starts_again_when_it_was_killed():
    run("pass")
    (process,) = sandboxes()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert run("print(1)").output == "1\n" and len(sandboxes()) == 1
