"""Tensors of a Hugging Face directory, read one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFTensors:
    """`checkpoint[name]` reads one tensor; files are mapped, not loaded. Use as a context manager.

    Raises:
        FileNotFoundError: the directory has no safetensors.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self._open: dict[str, safe_open] = {}
        if (self.path / INDEX).is_file():
            self._files: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]
        elif (self.path / SINGLE).is_file():
            with safe_open(self.path / SINGLE, "pt") as file:
                self._files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{path!r} has neither {SINGLE} nor {INDEX}: give a Hugging Face checkpoint")

    def __enter__(self) -> HFTensors:
        return self

    def __exit__(self, *exception) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def names(self) -> list[str]:
        return list(self._files)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, "pt")
        return self._open[file].get_tensor(name)
