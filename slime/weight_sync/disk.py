"""Weights to engines that share nothing with the trainer but a directory.

Trainer rank 0 publishes each version as a directory; the engines load it, or pull it into a checkpoint of their host
(`/pull_weights`) and load that. In delta mode only what changed since the last version is written. Engines go on
generating until they load.
"""

from __future__ import annotations

import shutil
import uuid
from argparse import Namespace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from slime.utils.misc import load_hook
from slime.weight_sync.buckets import WeightSource, plan_buckets
from slime.weight_sync.disk_format import Manifest, VersionWriter, as_bytes, version_dir
from slime.weight_sync.engines import Engines, WeightSyncError
from slime.weight_sync.failures import error_of, raise_on_all_ranks
from slime.weight_sync.updater import WeightUpdater

NEEDS_FULL = 409
"""What /pull_weights answers when deltas do not lead to the version."""


class DiskPublisher:
    """Writes versions; lives as long as the trainer, while engines come and go. `publish` is collective.

    Args:
        args: the `update_weight_*` flags.
        source: the trainer's weights.
        rank: this trainer rank; 0 writes.
        device: where weights are gathered.
        origin: the engines' checkpoint, whose small files a full version has, too.
    """

    def __init__(self, args: Namespace, source: WeightSource, rank: int, device: torch.device, origin: str) -> None:
        self.args = args
        self.origin = origin
        self.source = source
        self.rank = rank
        self.device = device
        self.root = Path(args.update_weight_disk_dir)
        self.buckets = plan_buckets(source.tensor_specs(), args.update_weight_buffer_size)
        self.chain = uuid.uuid4().hex
        self.published: int | None = None
        self.full_version: int | None = None
        """The last version that was written in full."""
        self._delta_bytes = self._full_bytes = 0
        self._snapshot: dict[str, torch.Tensor] = {}
        """Delta mode: the bytes of the last version, in (pinned) host memory of rank 0."""

    def publish(self, version: int, full: bool = False) -> int:
        """Write a version, unless it is there; bytes written (rank 0).

        Args:
            full: write all of it again, whatever is there.
        """
        if version == self.published and not full:
            return 0
        # Deltas that together are as large as the model no longer save anything: start again with a full version.
        as_delta = self.args.update_weight_mode == "delta" and not full and self.published is not None
        as_delta = as_delta and self._delta_bytes < max(1, self._full_bytes)
        base, self.published = (self.published if as_delta else None), None
        written = self._write(version, base) if self.rank == 0 else self._help()
        if base is None:
            self.full_version = version
        sizes = [base is None, written]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(sizes, src=0)
        was_full, written = sizes
        self._full_bytes, self._delta_bytes = (
            (written, 0) if was_full else (self._full_bytes, self._delta_bytes + written)
        )
        self.published = version
        return written

    def _help(self) -> int:
        for bucket in self.buckets:
            self.source.gather(bucket.specs, None)
        return 0

    def _write(self, version: int, base: int | None) -> int:
        args = self.args
        manifest = Manifest(
            version, self.chain, base, args.update_weight_delta_encoding, args.update_weight_delta_checksum
        )
        writer = VersionWriter(self.root, manifest, self.origin)
        try:
            for bucket in self.buckets:
                flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=self.device)
                self.source.gather(bucket.specs, bucket.views(flat))
                names = [spec.name for spec in bucket.specs]
                tensors = dict(zip(names, bucket.views(flat.cpu()), strict=True))
                if base is None:
                    writer.add_full(tensors)
                else:
                    new = {name: as_bytes(tensor) for name, tensor in tensors.items()}
                    writer.add_delta(self._snapshot, new)
                if args.update_weight_mode == "delta":
                    self._remember(tensors)
            writer.publish()
        except BaseException:
            writer.discard()
            raise
        return writer.nbytes

    def _remember(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            data = as_bytes(tensor)
            if name not in self._snapshot:
                self._snapshot[name] = torch.empty_like(data, pin_memory=self.device.type == "cuda")
            self._snapshot[name].copy_(data)

    def remove_old(self) -> None:
        """Remove the versions that no engine can need: those before the last full one."""
        if self.rank != 0 or self.full_version is None or self.args.update_weight_disk_keep_files:
            return
        oldest = version_dir(self.root, self.full_version)
        for directory in self.root.glob("weight_v*"):
            if directory.name < oldest.name:
                shutil.rmtree(directory, ignore_errors=True)


class DiskUpdater(WeightUpdater):
    """A `WeightUpdater` whose weights travel through a directory.

    Args:
        publisher: writes the versions.
        engines: those to bring to the new version.
        version: weight version that they hold now.
        pause_mode: see `WeightUpdater`.
    """

    def __init__(self, publisher: DiskPublisher, engines: Engines, version: int, pause_mode: str) -> None:
        self.publisher = publisher
        self.engines = engines
        self.rank = publisher.rank
        self.version = version
        self.pause_mode = pause_mode
        self.buckets = publisher.buckets

    def _push(self) -> dict[str, float]:
        args, publisher, marks = self.publisher.args, self.publisher, [perf_counter()]
        written = publisher.publish(self.version)
        directory = version_dir(publisher.root, self.version)
        self._call_hook(directory)
        marks.append(perf_counter())
        local = args.update_weight_local_checkpoint_dir
        if local is not None:
            payload = {
                "local_checkpoint_dir": local,
                "source_dir": str(publisher.root),
                "target_version": self.version,
            }
            pull = partial(self.engines.call, "/pull_weights", payload)
            failure = error_of(pull) if self.rank == 0 else None
            if self._needs_full(failure):
                written += publisher.publish(self.version, full=True)
                failure = error_of(pull) if self.rank == 0 else None
            raise_on_all_ranks(failure)
            directory = Path(local) / "checkpoint"
        marks.append(perf_counter())
        raise_on_all_ranks(error_of(lambda: self._load(directory)) if self.rank == 0 else None)
        publisher.remove_old()
        marks.append(perf_counter())
        return {
            "perf/update_weights_write_time": marks[1] - marks[0],
            "perf/update_weights_pull_time": marks[2] - marks[1],
            "perf/update_weights_load_time": marks[3] - marks[2],
            "perf/update_weights_bytes": float(written),
        }

    def _needs_full(self, failure: WeightSyncError | None) -> bool:
        """Whether deltas did not lead an engine to the version; the same answer on every rank."""
        answer = torch.tensor([int(failure is not None and failure.status == NEEDS_FULL)])
        if dist.get_world_size() > 1:
            dist.broadcast(answer, src=0)
        return bool(answer.item())

    def _call_hook(self, directory: Path) -> None:
        path = self.publisher.args.custom_update_weight_post_write_path
        if path is not None and self.rank == 0:
            hook = load_hook(path, "--custom-update-weight-post-write-path")
            hook(self.publisher.args, str(directory), self.engines.urls)

    def _load(self, directory: Path) -> None:
        self.engines.call("/pause_generation", {"mode": self.pause_mode})
        if self.pause_mode == "abort":
            self.engines.flush_cache()
        payload = {"model_path": str(directory), "weight_version": str(self.version), "flush_cache": False}
        self.engines.call("/update_weights_from_disk", payload)
        self.engines.call("/continue_generation", {})

    def close(self) -> None:
        self.engines.close()
