"""A wrong configuration is reported before anything heavy is imported, in a fresh process."""

import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration
HEAVY = ("torch", "ray", "transformers", "numpy", "aiohttp", "pyarrow")
PROBE = f"""
import sys
from slime.utils.arguments import parse_args
try:
    parse_args(sys.argv[1:])
except SystemExit as exit_:
    print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
    sys.exit(exit_.code)
"""


def timed(*command: str) -> tuple[subprocess.CompletedProcess, float]:
    """Result, and seconds of processor time: what else the machine does has no part in them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "words, message",
    [
        (("--rollout-batchsize", "8"), "did you mean --rollout-batch-size?"),
        (("--hf-checkpoint", "/nowhere", "--use-kl-loss", "--num-rollout", "3"), "--ref-load: is required"),
    ],
)
def test_config_error_is_reported_at_once(words, message):
    result, seconds = timed("-c", PROBE, *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "heavy: []" in result.stdout
    assert seconds < 1.5


def test_train_command_reports_before_it_imports_the_loop():
    probe = (
        "import sys\nfrom slime.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n"
        f"    print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result, seconds = timed("-c", probe, "train", "--rollout-batchsize", "8")
    assert "did you mean --rollout-batch-size?" in result.stderr
    assert "heavy: []" in result.stdout
    assert seconds < 1.5


def test_right_config_is_light_too(setup):
    result, seconds = timed("-c", PROBE, *setup.argv("--print-config"))
    assert result.returncode == 0, result.stderr
    assert "heavy: []" in result.stdout
    assert seconds < 1.5


@pytest.mark.parametrize(
    "words, code, message",
    [
        ((), 2, "usage: slime COMMAND"),
        (("--help",), 0, "quickstart"),
        (("--version",), 0, "slime "),
        (("trian",), 2, "did you mean slime train?"),
        (("xyzzy",), 2, "there are quickstart, train, train-async"),
        (("flags", "kl-loss"), 0, "--kl-loss-coef"),
        (("flags", "xyzzy"), 1, "no flag matches xyzzy"),
    ],
)
def test_command_line(words, code, message):
    result, seconds = timed("-m", "slime.cli", *words)
    assert result.returncode == code
    assert message in result.stdout + result.stderr
    assert seconds < 1.5


def test_ctrl_c_while_the_loop_is_imported(setup):
    """One line and the code of a shell, not the traceback of an import."""
    probe = (
        "import os, signal, sys\nfrom slime.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'ray':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        # A shell that started the tests in the background has Ctrl-C ignored, and this process inherits it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    result, _ = timed("-c", probe, "train", *setup.argv())
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1] == "interrupted" and "Traceback" not in result.stderr
