"""HTTP control of the inference engines during a weight update.

The trainer talks to the engines directly: a hop through another process per bucket would cost more than the engine's
own work on a GPU. The endpoints are SGLang's native ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

# Endpoints that releases of SGLang before 0.5.18 neither have nor need.
OPTIONAL = frozenset({"/begin_weight_update", "/end_weight_update"})


class WeightSyncError(RuntimeError):
    """An engine refused or did not answer; the message names engine and endpoint."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Engines:
    """The engine servers, by URL. Calls go to several at once and raise the first failure.

    Args:
        urls: `http://host:port` of each engine.
        timeout: seconds one call may take.
    """

    def __init__(self, urls: Sequence[str], timeout: float = 600.0):
        self.urls = list(urls)
        self.timeout = timeout
        self._pool = ThreadPoolExecutor(max(1, len(self.urls)), thread_name_prefix="weight-sync")

    def __len__(self) -> int:
        return len(self.urls)

    def start(self, index: int, path: str, payload: dict[str, Any]) -> Future:
        """Begin one POST and return its future."""
        return self._pool.submit(self._post, self.urls[index], path, payload)

    def call(self, path: str, payload: dict[str, Any], indices: Sequence[int] | None = None) -> list[Any]:
        """POST to all engines (or those at `indices`) at once; the replies in order."""
        indices = range(len(self)) if indices is None else indices
        futures = [self.start(i, path, payload) for i in indices]
        return [future.result() for future in futures]

    def flush_cache(self, patience: float = 60.0) -> None:
        """Flush every prefix cache; an engine refuses while requests are still winding down, so ask again."""
        deadline, pause = monotonic() + patience, 0.01
        pending = list(range(len(self)))
        while pending:
            futures = {i: self.start(i, "/flush_cache", {}) for i in pending}
            refused = {i: future.exception() for i, future in futures.items() if future.exception()}
            for error in refused.values():
                if not isinstance(error, WeightSyncError) or error.status != 400 or monotonic() > deadline:
                    raise error
            pending = list(refused)
            if pending:
                sleep(pause)
                pause = min(1.0, 2 * pause)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _post(self, url: str, path: str, payload: dict[str, Any]) -> Any:
        parts = urlsplit(url)
        connection = HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)
        try:
            connection.request("POST", path, json.dumps(payload), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
        except (OSError, HTTPException) as error:
            raise WeightSyncError(f"engine {url} did not answer {path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status == 404 and path in OPTIONAL:
            return None
        if response.status != 200:
            text = body.decode(errors="replace")[:2000]
            raise WeightSyncError(f"engine {url} answered {path} with {response.status}: {text}", response.status)
        try:
            reply = json.loads(body) if body else None
        except json.JSONDecodeError:
            return body.decode(errors="replace")
        if isinstance(reply, dict) and reply.get("success") is False:
            raise WeightSyncError(f"engine {url} failed {path}: {reply.get('message', reply)}", response.status)
        return reply
