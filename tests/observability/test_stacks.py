"""Short forms of stack dumps, and asking real processes."""

import asyncio
import re
import subprocess
import sys

import pytest

from slime.observability import stacks

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f02 [slime-async] (most recent call first):
  File "/usr/lib/python3.11/http/client.py", line 300 in recv
  File "/srv/slime/weight_sync/engines.py", line 80 in _post
  File "/srv/slime/weight_sync/updater.py", line 70 in _push

Current thread 0x00007f03 (most recent call first):
  File "/srv/slime/ray/train_actor.py", line 12 in train
"""


@pytest.mark.unit
def test_summary_names_what_slime_waits_for():
    assert stacks.summarize(DUMP) == (
        "_post (slime/weight_sync/engines.py:80), in recv (client.py:300); train (slime/ray/train_actor.py:12)"
    )
    assert stacks.summarize("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") == "idle"


@pytest.mark.integration
def test_processes_that_cannot_answer(tmp_path):
    silent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    code = "from slime.observability import stacks; stacks.dump_on_signal(); print(flush=True); input()"
    with open(tmp_path / "log", "wb") as log:
        listening = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    listening.stdout.readline()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    words = stacks.collect(
        {
            "silent": (silent.pid, tmp_path / "none"),
            "listening": (listening.pid, tmp_path / "log"),
            "gone": (gone.pid, tmp_path / "none"),
        }
    )
    assert words == {"silent": "no stacks of this kind of process", "listening": "idle", "gone": "gone"}
    assert silent.poll() is None and listening.poll() is None
    for process in (silent, listening):
        process.kill()
        process.communicate()


async def a_tool_that_never_answers():
    await asyncio.sleep(60)


@pytest.mark.unit
async def test_tasks_are_counted_by_where_users_code_waits():
    tasks = [asyncio.ensure_future(asyncio.wait_for(a_tool_that_never_answers(), 60)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    text = stacks.describe_tasks(asyncio.get_running_loop())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert re.match(r"3 x a_tool_that_never_answers \(test_stacks.py:\d+\)", text), text
