"""Writing a checkpoint while training goes on (`--async-save`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from slime.backends.common.checkpoint import AtomicDirectory


class BackgroundSave:
    """One checkpoint at a time is written by a thread of each rank.

    Tensors are copied to host memory before `start` returns, so that training may change them. Nothing of a checkpoint
    is visible until `finish`, or a `poll` that finds every rank done, has published it.
    """

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._publish: Callable[[], None] | None = None

    def start(self, request, directory: AtomicDirectory, publish: Callable[[], None]) -> None:
        """Begin to write; collective. The one before must be finished.

        Args:
            request: Megatron's AsyncRequest.
            publish: collective; called when everything is written.
        """

        def complete() -> None:
            directory.run(self._raise_error)
            directory.run(lambda: [finalize() for finalize in request.finalize_fns])
            publish()

        args = list(request.async_fn_args)
        if request.async_fn is not None:
            args[1] = _own_copies(args[1], request.preload_fn())
        self._error, self._publish = None, complete
        self._thread = threading.Thread(target=self._write, args=(request, args), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, request, args: list) -> None:
        try:
            if request.async_fn is not None:
                request.async_fn(*args, **request.async_fn_kwargs)
        except Exception as error:  # raised on every rank by `finish`
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def poll(self) -> None:
        """Publish the checkpoint if all ranks have written it; collective."""
        if self._publish is None:
            return
        writing = [False] * dist.get_world_size()
        dist.all_gather_object(writing, self._thread.is_alive())
        if not any(writing):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and publish it; collective.

        Raises:
            CheckpointError: on every rank when one could not write.
        """
        if self._publish is None:
            return
        self._thread.join()
        publish, self._publish = self._publish, None
        publish()


def _own_copies(buckets: list, staged: list) -> list:
    """`staged`, with copies of the tensors that were in host memory already and are therefore the model's own."""
    return [
        (
            file,
            key,
            (content, [(item, _own(before, after)) for (_, before), (item, after) in zip(old, new, strict=True)]),
        )
        for (_, _, (_, old)), (file, key, (content, new)) in zip(buckets, staged, strict=True)
    ]


def _own(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return after.clone() if after.data_ptr() == before.data_ptr() else after
