"""Send one bucket while the next is gathered: two pieces of memory that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from slime.weight_sync.buckets import Bucket
from slime.weight_sync.engines import WeightSyncError
from slime.weight_sync.failures import error_of

if TYPE_CHECKING:
    from slime.weight_sync.updater import Transport


class SendPipeline:
    """The sending side of one update. Memory is allocated here and given back by `finish`.

    Args:
        buckets: all of them, in the order in which they are sent.
        weight_version: what the engines will call these weights.
    """

    def __init__(self, transport: Transport, buckets: Sequence[Bucket], weight_version: str):
        self.transport = transport
        self.weight_version = weight_version
        self._failure: WeightSyncError | None = None
        size, count = max(bucket.nbytes for bucket in buckets), min(2, len(buckets))
        self._buffers = [transport.allocate(size) for _ in range(count)]
        self._sends: list[Future | None] = [None] * count
        self._turn = 0
        # One thread: the engines get the buckets one after the other. On a stream of its own, else every send would
        # wait for the gathering of the next bucket.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="weight-send")
        self._stream = torch.cuda.Stream() if self._buffers[0].is_cuda else None

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """Memory [bucket.numel] to fill; waits until what was sent from it has arrived."""
        self._wait(self._turn)
        return self._buffers[self._turn][: bucket.nbytes].view(bucket.dtype)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Begin to send what `buffer` gave, once the device has filled it."""
        filled = None
        if flat.is_cuda:
            filled = torch.cuda.Event()
            filled.record()
        self._sends[self._turn] = self._sender.submit(self._send, bucket, flat, filled)
        self._turn = (self._turn + 1) % len(self._buffers)

    def finish(self) -> WeightSyncError | None:
        """Wait for everything sent, free the memory; the first failure, after which nothing was sent."""
        for turn in range(len(self._sends)):
            self._wait(turn)
        self._sender.shutdown()
        self._buffers.clear()
        return self._failure

    def _wait(self, turn: int) -> None:
        future, self._sends[turn] = self._sends[turn], None
        if future is not None:
            future.result()

    def _send(self, bucket: Bucket, flat: torch.Tensor, filled: torch.cuda.Event | None) -> None:
        if self._failure is not None:
            return
        if filled is not None:
            filled.synchronize()
        with torch.cuda.stream(self._stream):
            self._failure = error_of(lambda: self.transport.send(bucket, flat, self.weight_version))
