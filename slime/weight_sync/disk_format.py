"""What one version of the weights looks like on disk.

`weight_v{N:06d}/` has the layout of a Hugging Face checkpoint when it is full. A delta holds only what changed since
another version: per tensor its bytes XORed with the old ones, or the new bytes, compressed with zstd. In both cases
`slime_weights.json` lists every tensor with its digest. A directory appears under its name only when it is complete.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
import zstandard
from safetensors.torch import save_file

from slime.utils.checkpoint_files import copy_small_files

MANIFEST = "slime_weights.json"
INDEX = "model.safetensors.index.json"
ZSTD_LEVEL = 1


def version_dir(root: str | Path, version: int) -> Path:
    return Path(root) / f"weight_v{version:06d}"


def digest_function(kind: str) -> Callable[[Any], str]:
    """Bytes-like -> hex digest."""
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest
    if kind == "adler32":
        return lambda data: f"{zlib.adler32(data):08x}"
    blake3 = importlib.import_module("blake3")
    return lambda data: blake3.blake3(data).hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes of a CPU tensor, as a flat uint8 view."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclass
class Entry:
    """One tensor of a version. `digest` is of the whole tensor's bytes, as they are in this version."""

    file: str
    nbytes: int
    digest: str


@dataclass
class Manifest:
    """What a version directory holds. `chain` is one for all versions that build on each other."""

    version: int
    chain: str
    base_version: int | None
    """The version that a delta builds on; None of a full one."""
    encoding: str
    checksum: str
    tensors: dict[str, Entry] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return self.base_version is None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises:
        OSError, ValueError, KeyError, TypeError: there is none, or it is damaged.
        """
        data = json.loads((directory / MANIFEST).read_text())
        data["tensors"] = {name: Entry(**entry) for name, entry in data["tensors"].items()}
        return cls(**data)


class VersionWriter:
    """Writes one version under a temporary name; `publish` gives it its own.

    Args:
        root: where versions stand side by side.
        manifest: without tensors; `add` fills them in.
        origin: checkpoint whose configuration and tokenizer files a full version repeats.
    """

    def __init__(self, root: Path, manifest: Manifest, origin: str) -> None:
        self.root = root
        self.manifest = manifest
        self.origin = Path(origin)
        self.digest = digest_function(manifest.checksum)
        self.nbytes = 0
        self._files: list[str] = []
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        root.mkdir(parents=True, exist_ok=True)
        self.path = root / f".{version_dir(root, manifest.version).name}.{uuid.uuid4().hex[:8]}.tmp"
        self.path.mkdir()

    def add_full(self, tensors: dict[str, torch.Tensor]) -> None:
        """One more file of whole tensors (CPU)."""
        file = f"model-{len(self._files) + 1:05d}.safetensors"
        for name, tensor in tensors.items():
            data = as_bytes(tensor).numpy()
            self.manifest.tensors[name] = Entry(file, data.nbytes, self.digest(data))
        self._save(file, {name: tensor.contiguous() for name, tensor in tensors.items()})

    def add_delta(self, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
        """One more file with what differs between `old` and `new` (flat uint8, by the same names)."""
        file = f"delta-{len(self._files) + 1:05d}.safetensors"
        payloads = {}
        for name, after in new.items():
            if torch.equal(old[name], after):
                continue
            data = torch.bitwise_xor(old[name], after) if self.manifest.encoding == "xor" else after
            self.manifest.tensors[name] = Entry(file, after.numel(), self.digest(after.numpy()))
            packed = bytearray(self._compressor.compress(data.numpy()))
            payloads[name] = torch.frombuffer(packed, dtype=torch.uint8)
        if payloads:
            self._save(file, payloads)

    def _save(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.path / file, metadata={"format": "pt"})
        self._files.append(file)
        self.nbytes += (self.path / file).stat().st_size

    def publish(self) -> Path:
        """Make the version visible in one step; one of the same number is replaced."""
        if self.manifest.is_full:
            self._complete_checkpoint()
        (self.path / MANIFEST).write_text(self.manifest.to_json())
        for file in self.path.iterdir():
            _flush(file)
        final = version_dir(self.root, self.manifest.version)
        if final.exists():
            replaced = self.path.with_suffix(".old")
            final.rename(replaced)
            self.path.rename(final)
            shutil.rmtree(replaced)
        else:
            self.path.rename(final)
        _flush(self.root)
        return final

    def _complete_checkpoint(self) -> None:
        """Index, configuration, tokenizer."""
        entries = self.manifest.tensors
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
            "weight_map": {name: entry.file for name, entry in entries.items()},
        }
        (self.path / INDEX).write_text(json.dumps(index))
        copy_small_files(self.origin, self.path)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
