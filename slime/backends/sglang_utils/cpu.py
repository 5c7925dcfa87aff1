"""What stock SGLang lacks on a machine without a GPU, and the flags with which it runs there.

SGLang imports two packages at start whose PyPI wheels need CUDA, although nothing of them is called on this path:
sgl_kernel, and torchvision (for images). Where they are not installed, stand-ins let SGLang be imported; a torchvision
for CUDA is completed instead (releases up to 0.5.20 need one). Host memory that it registers with the CUDA driver, for
faster copies to the device, stays as it is, and so does what its adapters and its prefill servers would pin. On a GPU
machine nothing here has any effect.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own switch for its CPU engine; the processes that a server spawns see it too."""

CPU_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 32768,
    "max_running_requests": 32,
    "sleep_on_idle": True,
}
"""Server arguments on CPU, where the user gives none."""

PINNING = {"--enable-lora", "--disaggregation-mode"}
"""What makes SGLang copy from a device to pinned memory even with `--device cpu`."""


class StandIn(types.ModuleType):
    """A module whose functions can be imported; calling one is an error.

    Args:
        suffix: how the names end that it has.
    """

    def __init__(self, name: str, suffix: str = ""):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self._suffix = suffix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not name.endswith(self._suffix):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not there on a machine without CUDA")

        return missing


def install_shims() -> None:
    """Make SGLang importable without CUDA. Call before it is imported, in every process of the server."""
    if os.environ.get(CPU_ENGINE) != "1" or "sgl_kernel" in sys.modules:
        return
    sys.modules["sgl_kernel"] = StandIn("sgl_kernel", suffix="_cpu")
    _register_nothing()
    if PINNING & set(sys.argv):  # the server's, in the processes that it spawns too
        _copy_within_host_memory()
    if importlib.util.find_spec("torchvision") is not None:
        complete_torchvision()
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers that there is none
    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = StandIn(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def _register_nothing() -> None:
    """Registering host memory succeeds without an effect: there is no device to copy to."""
    import torch

    if not torch.cuda.is_available():
        names = ("cudaHostRegister", "cudaHostUnregister")
        torch.cuda.cudart = lambda: types.SimpleNamespace(**dict.fromkeys(names, lambda *args: 0))


class Done:
    """An event on a CPU: what it was recorded after has happened."""

    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _copy_within_host_memory() -> None:
    """Tensors to be pinned are made in plain memory, and copies are over when they return: torch raises at both."""
    import torch

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            return make(*args, **{**kwargs, "pin_memory": False})

        return wrapper

    if not torch.accelerator.is_available():
        for name in ("empty", "tensor", "zeros"):
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *args: self
        torch.cuda.Event, torch.cuda.current_stream = Done, lambda device=None: None


def complete_torchvision() -> None:
    """Declare the operators that torchvision's Python part refers to, where its CUDA library cannot be loaded."""
    import torch

    library = next(Path(importlib.util.find_spec("torchvision").origin).parent.glob("_C*.so"))
    try:
        torch.ops.load_library(library)
    except OSError:
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", schema)
