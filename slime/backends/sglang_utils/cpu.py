"""What stock SGLang lacks on a machine without a GPU, and the flags with which it runs there.

PyPI's wheels are CUDA builds. Two of their modules fail to import where there is no CUDA although nothing of them is
called on this path; on a GPU machine nothing here has any effect.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
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


class _StandInKernels(types.ModuleType):
    """In place of `sgl_kernel`: modules that name its CPU kernels can be imported; calling one is an error."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def kernel(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} is not part of SGLang's PyPI wheels")

        return kernel


def install_shims() -> None:
    """Make SGLang importable without CUDA. Call before it is imported, in every process of the server."""
    if os.environ.get(CPU_ENGINE) != "1" or "sgl_kernel" in sys.modules:
        return
    import torch

    module = _StandInKernels("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    sys.modules["sgl_kernel"] = module
    # PyPI's torchvision registers these only with CUDA, but its Python part refers to them at import.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
