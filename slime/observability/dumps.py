"""Rollout dumps (`--save-debug-rollout-data`, `--load-debug-rollout-data`): a rollout as a file, to replay later."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


class DumpError(ValueError):
    """A file that is no dump, or not of the kind that is needed; the message has its path."""


def save_rollout_dump(template: str, rollout_id: int | str, samples: list[Sample]) -> Path:
    """Write `{"rollout_id", "samples"}` with torch.save at `template` with `{rollout_id}` filled in."""
    import torch

    path = Path(template.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, temporary)
    os.replace(temporary, path)
    return path


def load_rollout_dump(template: str, rollout_id: int, subsample: float | None = None) -> list[Sample]:
    """Samples of a dump; `subsample` keeps that fraction, half from the head and half from the tail.

    Raises:
        FileNotFoundError: names the flag, and the path after the rollout id was filled in.
        DumpError: the file is no rollout dump.
    """
    path = Path(template.format(rollout_id=rollout_id))
    if not path.is_file():
        raise FileNotFoundError(f"--load-debug-rollout-data {template}: no dump of rollout {rollout_id} at {path}")
    data = load_dump(path)
    if "samples" not in data:
        raise DumpError(f"{path} is no rollout dump; --save-debug-rollout-data writes those")
    samples = [Sample.from_dict(entry) for entry in data["samples"]]
    if subsample is not None:
        keep = max(2, int(len(samples) * subsample))
        if keep < len(samples):
            samples = samples[: keep // 2] + samples[len(samples) - (keep - keep // 2) :]
    return samples


def load_dump(path: Path) -> dict[str, Any]:
    """The content of a dump of either kind, read without running code from it.

    Raises:
        DumpError: the file is something else.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            content = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # what the pickle of a file that is none runs into
        reason = str(error).strip().partition("\n")[0]
        raise DumpError(f"{path} is no dump, or was cut: {type(error).__name__}: {reason[:200]}") from error
    if not isinstance(content, dict):
        raise DumpError(f"{path} is no dump: it holds a {type(content).__name__}")
    return content


def save_tokenizer(hf_checkpoint: str, directory: str) -> None:
    """Copy the tokenizer's files of a checkpoint directory to `directory`/tokenizer, to read token ids with later."""
    target = Path(directory) / "tokenizer"
    target.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in Path(hf_checkpoint).glob(pattern):
            shutil.copy(file, target / file.name)


def _numpy_globals() -> list[Any]:
    """What a pickled numpy array or scalar is made of (routed experts travel as arrays)."""
    import numpy as np

    kinds = (np.int32, np.int64, np.float32, np.float64, np.bool_)
    rebuild = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [np.ndarray, np.dtype, *rebuild, *(type(np.dtype(kind)) for kind in kinds)]
