import errno
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from slime.observability.dumps import load_rollout_dump, save_rollout_dump
from slime.observability.run_dir import RunDir, describe_error, tail, to_plain
from slime.utils.types import Sample

pytestmark = pytest.mark.unit


def test_samples_are_spread_and_readable(tmp_path):
    samples = [Sample(index=i, prompt=f"p{i}", response="r", reward=np.float32(0.5), label="l") for i in range(64)]
    RunDir(tmp_path).write_samples("rollout_000000", samples)
    lines = [json.loads(line) for line in (tmp_path / "samples" / "rollout_000000.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(0, 64, 8))
    assert lines[0] == {
        **lines[0],
        "prompt": "p0",
        "response": "r",
        "reward": 0.5,
        "label": "l",
        "status": "pending",
    }


def test_to_plain():
    assert to_plain({"a": (1, np.int64(2)), 3: {"x"}, "o": Sample.Status.ABORTED})["a"] == [1, 2]
    json.dumps(to_plain({"array": np.zeros(3), "object": object()}))


def test_errors_of_a_full_disk_name_the_disk(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")
    text = describe_error(error, str(tmp_path), None, str(tmp_path / "not-there"))
    assert re.fullmatch(
        rf"OSError: \[Errno 28\] No space left on device; left: [\d,]+\.\d MB in {re.escape(str(tmp_path))}", text
    )
    assert describe_error(KeyError("a"), str(tmp_path)) == "KeyError: 'a'"


def test_tail(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(str(i) for i in range(10000)))
    assert tail(log, 2) == "9998\n9999"
    assert "empty" in tail(tmp_path / "missing")


def test_redirected_output_includes_native_code_and_children(tmp_path):
    log = tmp_path / "process.log"
    code = (
        "import os, sys; from slime.observability.run_dir import redirect_output\n"
        f"redirect_output({str(log)!r}); print('python'); sys.stdout.flush(); os.write(2, b'native\\n')\n"
        "os.system('echo child')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == result.stderr == ""
    assert log.read_text().splitlines() == ["python", "native", "child"]


def test_dump_round_trip(tmp_path):
    samples = [
        Sample(index=i, tokens=[1, 2, i], response_length=1, reward={"score": 1.0}, status=Sample.Status.COMPLETED)
        for i in range(10)
    ]
    samples[0].rollout_routed_experts = np.arange(6, dtype=np.int32).reshape(2, 1, 3)
    template = str(tmp_path / "deep" / "{rollout_id}.pt")
    save_rollout_dump(template, 4, samples)
    loaded = load_rollout_dump(template, 4)
    assert (loaded[0].rollout_routed_experts == samples[0].rollout_routed_experts).all()
    assert loaded[1:] == samples[1:]
    half = load_rollout_dump(template, 4, subsample=0.4)
    assert [s.index for s in half] == [0, 1, 8, 9]
    with pytest.raises(FileNotFoundError, match="rollout 5"):
        load_rollout_dump(template, 5)


def test_a_dump_cannot_run_code(tmp_path):
    import torch

    class Evil:
        def __reduce__(self):
            return (exec, ("open('/dev/null')",))

    torch.save({"rollout_id": 0, "samples": [Evil()]}, tmp_path / "0.pt")
    with pytest.raises(Exception, match=r"0\.pt is no dump.*UnpicklingError: Weights only load failed"):
        load_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0)
