"""A real engine server as a child process, and a small client for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class EngineServer:
    """Start with command-line flags, talk JSON, stop."""

    kind = "embedded"
    start_seconds = 120

    def __init__(self, model_path: str, directory: Path, *flags: str, parent_pid: int | None = None):
        self.port_file = directory / "port"
        self.log = directory / "server.log"
        command, env = self.command(model_path)
        command += ["--port-file", str(self.port_file), "--parent-pid", str(parent_pid or os.getpid()), *flags]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
        self.url = ""

    def command(self, model_path: str) -> tuple[list[str], dict[str, str]]:
        """argv and environment."""
        return [sys.executable, "-m", "slime.engine.server", "--model-path", model_path, "--device", "cpu"], {}

    def wait(self) -> EngineServer:
        deadline = time.monotonic() + self.start_seconds
        while not self.port_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{int(self.port_file.read_text())}"
        return self

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    def request(self, path: str, body=None, *, raw: bytes | None = None, timeout: float = 120):
        """(status, parsed body); GET without a body, POST with one."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, content = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def ok(self, path: str, body=None):
        """The body of a reply that must be 200."""
        status, reply = self.request(path, body)
        assert status == 200, (path, status, reply)
        return reply

    def error(self, path: str, body=None, status: int = 400, **kwargs) -> str:
        """The message of a reply that must have this status."""
        got, reply = self.request(path, body, **kwargs)
        assert got == status, (path, got, reply)
        return message_of(reply)

    def generate(self, input_ids, **params):
        """/generate with log-probs; params are sampling parameters."""
        return self.ok("/generate", {"input_ids": input_ids, "sampling_params": params, "return_logprob": True})

    def stream(self, body) -> list[dict]:
        """Chunks of a streamed /generate, and the end marker checked."""
        request = urllib.request.Request(
            self.url + "/generate", json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = [line[6:].strip() for line in response if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def load(self) -> dict:
        return self.ok("/v1/loads")["loads"][0]

    def wait_load(self, predicate, timeout: float = 30) -> dict:
        """Wait until the load satisfies `predicate`."""
        deadline = time.monotonic() + timeout
        while not predicate(load := self.load()):
            assert time.monotonic() < deadline, load
            time.sleep(0.01)
        return load


def message_of(reply) -> str:
    """The text of an error: SGLang has several shapes for it."""
    if isinstance(reply, dict):
        error = reply.get("error", reply.get("message"))
        return str(error.get("message") if isinstance(error, dict) else error)
    return str(reply)


class Background:
    """Requests that run while the test does something else."""

    def __init__(self, server: EngineServer):
        self.server = server
        self.pool = ThreadPoolExecutor(16)

    def generate(self, input_ids, rid: str | None = None, **params):
        body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}
        if rid:
            body["rid"] = rid
        return self.pool.submit(self.server.ok, "/generate", body)

    def close(self) -> None:
        self.pool.shutdown()
