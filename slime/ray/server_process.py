"""One HTTP server as a child process: engine or router. Started, found healthy, watched, ended with all it started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from slime.observability.run_dir import tail

POLL_SECS = 0.05
TERMINATE_GRACE_SECS = 5.0

# No proxy from the environment: these servers are our own, on this machine or in the cluster.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A server process did not start, died, or refused a request; the message names it and shows its log's end.

    `status` is the HTTP status of a refusal.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def http_json(method: str, url: str, payload: Any = None, timeout: float = 600.0) -> Any:
    """One JSON request without retries; the decoded reply, text when it is no JSON, None when it is empty.

    Raises:
        ServerError: no connection, or a status of 400 or more (with the server's message).
    """
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    try:
        with _opener.open(request, timeout=timeout) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")
        raise ServerError(f"{method} {url} answered {error.code}: {message[:2000]}", error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{method} {url}: {error}") from error
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text


class ServerProcess:
    """Runs `command`, which must write its port to `--port-file` once it listens.

    Args:
        name: what messages call it, e.g. `engine-0`.
        command: argv; `--port-file` and `--parent-pid` are appended.
        log_file: takes stdout and stderr; the port file stands beside it for a moment.
        host: where it listens.
    """

    def __init__(self, name: str, command: list[str], log_file: Path, host: str, env: dict[str, str] | None = None):
        self.name = name
        self.host = host
        self.log_file = log_file
        self._closing = threading.Event()
        self._port_file = log_file.with_suffix(".port")
        self._port_file.unlink(missing_ok=True)
        argv = [*command, "--port-file", str(self._port_file), "--parent-pid", str(os.getpid())]
        with open(log_file, "ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.port: int | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def wait_until_healthy(self, path: str = "/health", timeout: float = 600.0) -> str:
        """Wait for the port and a 200 on `path`; returns the URL.

        Raises:
            ServerError: it exited, or is not healthy after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.raise_if_dead()
            if self.port is None and self._port_file.exists():
                self.port = int(self._port_file.read_text())
                self._port_file.unlink()
            if self.port is not None:
                with contextlib.suppress(ServerError):
                    http_json("GET", self.url + path, timeout=5.0)
                    return self.url
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECS)
        raise ServerError(f"{self.name} is not healthy after {timeout:.0f} s. {self.describe_log()}")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def raise_if_dead(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise ServerError(self.describe_death(code))

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called: what ends from now on was meant to."""
        return self._closing.is_set()

    def wait_for_death(self) -> str | None:
        """Block until the process ends; a description, or None when `close` ended it."""
        code = self._process.wait()
        return None if self._closing.is_set() else self.describe_death(code)

    def describe_death(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{self.name} (pid {self.pid}) {how}. {self.describe_log()}"

    def describe_log(self) -> str:
        return f"The end of its log {self.log_file}:\n{tail(self.log_file)}"

    def close(self) -> None:
        """End the process and everything in its process group: SIGTERM, then SIGKILL after a grace period."""
        self._closing.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_GRACE_SECS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._port_file.unlink(missing_ok=True)
