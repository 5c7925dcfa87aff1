"""An engine host's own checkpoint, brought to a published version: full ones are copied, deltas applied in place.

    {local_dir}/checkpoint/   Hugging Face layout; what the engine loads
    {local_dir}/state.json    version and chain of the checkpoint, or that it is being changed

Every tensor that was touched is compared with the digest that the trainer took. Engines of one host share the
checkpoint: the first one pulls, the others find it done.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zstandard
from safetensors import SafetensorError
from safetensors.numpy import load_file

from slime.utils.misc import atomic_write
from slime.weight_sync.disk_format import INDEX, MANIFEST, Manifest, digest_function, version_dir


class PullError(RuntimeError):
    """The version cannot be reached from what is there: a full one is needed."""


@dataclass
class LocalState:
    version: int | None = None
    chain: str = ""


def pull(local_dir: str | Path, source_dir: str | Path, target_version: int) -> Path:
    """Bring `local_dir` to `target_version`; the checkpoint's directory.

    Raises:
        PullError: a version is missing or damaged, here or there.
    """
    local = Path(local_dir)
    local.mkdir(parents=True, exist_ok=True)
    with open(local / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = _read_state(local)
        for manifest, directory in _plan(state, Path(source_dir), target_version):
            # Until the end it is neither the old version nor the new one.
            _write_state(local, LocalState())
            if manifest.is_full:
                _copy_full(local, directory, manifest)
            else:
                _apply_delta(local, directory, manifest)
            _write_state(local, LocalState(manifest.version, manifest.chain))
    return local / "checkpoint"


def _plan(state: LocalState, source: Path, target: int) -> list[tuple[Manifest, Path]]:
    """The versions to apply, in order."""
    steps: list[tuple[Manifest, Path]] = []
    version: int | None = target
    while version is not None:
        directory = version_dir(source, version)
        try:
            manifest = Manifest.read(directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PullError(f"{directory} is missing or damaged: {error}") from error
        if steps and manifest.chain != steps[-1][0].chain:
            raise PullError(f"{directory} belongs to another run than version {target}")
        if state.version == version and state.chain == manifest.chain:
            break
        steps.append((manifest, directory))
        version = manifest.base_version
    return steps[::-1]


def _copy_full(local: Path, directory: Path, manifest: Manifest) -> None:
    checkpoint = local / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    try:
        shutil.copytree(directory, checkpoint, ignore=shutil.ignore_patterns(MANIFEST))
    except OSError as error:
        raise PullError(f"{directory} cannot be copied to {checkpoint}: {error}") from error
    _verify(_Checkpoint(checkpoint), manifest, directory)


def _apply_delta(local: Path, directory: Path, manifest: Manifest) -> None:
    checkpoint = _Checkpoint(local / "checkpoint")
    decompressor = zstandard.ZstdDecompressor()
    for file in sorted({entry.file for entry in manifest.tensors.values()}):
        try:
            payloads = load_file(directory / file)
            for name, packed in payloads.items():
                raw = decompressor.decompress(packed.tobytes(), max_output_size=manifest.tensors[name].nbytes)
                change, target = np.frombuffer(raw, np.uint8), checkpoint.bytes_of(name)
                if change.size != target.size:
                    raise PullError(f"{directory / file}: {name} has {change.size} bytes, not {target.size}")
                if manifest.encoding == "xor":
                    np.bitwise_xor(target, change, out=target)
                else:
                    target[:] = change
        except (OSError, KeyError, SafetensorError, zstandard.ZstdError) as error:
            raise PullError(f"{directory / file} is missing or damaged: {error!r}") from error
    _verify(checkpoint, manifest, directory)


def _verify(checkpoint: _Checkpoint, manifest: Manifest, directory: Path) -> None:
    digest = digest_function(manifest.checksum)
    for name, entry in manifest.tensors.items():
        if digest(checkpoint.bytes_of(name)) != entry.digest:
            raise PullError(f"{name} differs from what the trainer wrote to {directory}")
    checkpoint.flush()


class _Checkpoint:
    """A local checkpoint whose tensors can be changed in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: dict[str, np.memmap] = {}
        self._places: dict[str, tuple[str, int, int]] = {}
        try:
            for file in sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values())):
                self._open(file)
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise PullError(f"{path} is damaged: {error}") from error

    def _open(self, file: str) -> None:
        """The head of a safetensors file: its length, then JSON with each tensor's place behind the head."""
        with open(self.path / file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            head = json.loads(stream.read(length))
        self._maps[file] = np.memmap(self.path / file, np.uint8, "r+")
        for name, entry in head.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                self._places[name] = (file, 8 + length + begin, 8 + length + end)

    def bytes_of(self, name: str) -> np.ndarray:
        """A writable view of the tensor's bytes."""
        if name not in self._places:
            raise PullError(f"{self.path} has no tensor {name}")
        file, begin, end = self._places[name]
        return self._maps[file][begin:end]

    def flush(self) -> None:
        for mapped in self._maps.values():
            mapped.flush()


def _read_state(local: Path) -> LocalState:
    try:
        return LocalState(**json.loads((local / "state.json").read_text()))
    except (OSError, ValueError, TypeError):
        return LocalState()


def _write_state(local: Path, state: LocalState) -> None:
    atomic_write(str(local / "state.json"), json.dumps(asdict(state)).encode())
