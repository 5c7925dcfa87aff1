"""What stock megatron-core needs to run without Transformer Engine, and on CPU with gloo: all differences, in this
module alone.

Megatron asks `torch.cuda` for devices, streams and random states, and names the device "cuda". On a machine with
CUDA `install` changes nothing of that. Without, it gives `torch.cuda` CPU stand-ins for exactly the functions below
and maps "cuda" to CPU in calls of torch. Each stand-in counts its calls in `hits`, so that a test shows which are
needed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

hits: Counter[str] = Counter()
"""Calls of each stand-in since the start of the process."""

CPU = torch.device("cpu")


class _Stream:
    """A stream or event that has nothing to wait for."""

    def __init__(self, *args, **kwargs):
        hits["torch.cuda.Stream"] += 1

    def _nothing(self, *args, **kwargs) -> None:
        return None

    synchronize = wait_stream = wait_event = record = wait = _nothing

    def record_event(self, event=None):
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 0.0


def _nothing(*args, **kwargs) -> None:
    return None


def _zero(*args, **kwargs) -> int:
    return 0


def _get_rng_state(*args, **kwargs) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args, **kwargs) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


CUDA_STAND_INS = {
    "current_device": lambda: CPU,
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "stream": lambda *_: nullcontext(),
    "memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_allocated": _zero,
    "max_memory_reserved": _zero,
    "manual_seed": _manual_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
}
NVTX_STAND_INS = {"range_push": _nothing, "range_pop": _nothing}


def _counted(name: str, function):
    @functools.wraps(function, assigned=())
    def stand_in(*args, **kwargs):
        hits[name] += 1
        return function(*args, **kwargs)

    return stand_in


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class CudaMeansCpu(TorchFunctionMode):
    """Device "cuda" is the CPU, nothing is pinned, and CPU tensors name their type as CUDA's would be named.

    The last is for optimizers and gradient clipping, which branch on `Tensor.type()`.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            hits["Tensor.cuda"] += 1
            return args[0]
        if function is torch.Tensor.pin_memory or function is torch.Tensor.record_stream:
            hits[f"Tensor.{function.__name__}"] += 1
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            hits["Tensor.type"] += 1
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            hits["pin_memory="] += 1
            kwargs = {**kwargs, "pin_memory": False}
        if _is_cuda(kwargs.get("device")):
            hits["device="] += 1
            kwargs = {**kwargs, "device": CPU}
        if any(_is_cuda(arg) for arg in args):
            hits["device argument"] += 1
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)


_mode: CudaMeansCpu | None = None


def install() -> bool:
    """Prepare this process and thread for Megatron; call it before anything of `megatron` is imported.

    Returns:
        Whether stand-ins are used, that is, whether there is no CUDA.
    """
    global _mode
    # Advice to install Transformer Engine or apex, at every import.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    if torch.cuda.is_available():
        _patch_without_transformer_engine()
        _patch_unpermute()
        return False
    if _mode is None:
        _disable_compilation()
        for name, function in CUDA_STAND_INS.items():
            setattr(torch.cuda, name, _counted(f"torch.cuda.{name}", function))
        torch.cuda.Stream = torch.cuda.Event = _Stream  # classes: annotations name them
        for name, function in NVTX_STAND_INS.items():
            setattr(torch.cuda.nvtx, name, _counted(f"torch.cuda.nvtx.{name}", function))
        _mode = CudaMeansCpu()
        _mode.__enter__()
        _patch_without_transformer_engine()
        _patch_megatron()
    return True


def async_save_options() -> dict[str, Any]:
    """For `dist_checkpointing.save`: since 0.19 it would use another package for writing in the background."""
    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def of_class(mlp: Any, kind: type) -> Any:
    """The spec of a feed-forward layer, of class `kind` instead: a ModuleSpec before 0.19, a partial call since."""
    if isinstance(mlp, functools.partial):
        return functools.partial(kind.as_mlp_submodule, *mlp.args, **mlp.keywords)
    mlp.module = kind
    return mlp


def submodules_of(mlp: Any) -> Any:
    """What the spec of a feed-forward layer builds it of."""
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def set_experts(moe: Any, kind: type) -> None:
    """Let the submodules of a layer with experts have those of class `kind`: specs differ as in `of_class`."""
    if isinstance(moe.experts, functools.partial):
        moe.experts = functools.partial(kind, *moe.experts.args, **moe.experts.keywords)
    else:
        moe.experts.module = kind


def _disable_compilation() -> None:
    """Megatron compiles its small fused functions when they are defined. On CPU that costs more than it gives, and
    ranks that compile at once spoil each other's cache; so it is switched off while they are imported."""
    compile_function = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda inner: inner)
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_function
    jit.disable_jit_fuser()


def _patch_without_transformer_engine() -> None:
    """0.16.1 names things of Transformer Engine where there is none: in the router a function that it did not import,
    in latent attention stand-ins for classes, after it took the mere name for their presence."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    if importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config"):
        _patch_latent_projection()
    _patch_optimizer_loading()


def _patch_latent_projection() -> None:
    """0.19 asks for a projection fused with a norm, which only Transformer Engine has, for queries of latent attention
    that are neither projected down nor normalised. Here it is the plain projection."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    fused = QKNormConfigResolver._mla_fused_linear_or_default
    if hasattr(fused, "__wrapped__"):
        return

    @functools.wraps(fused)
    def plain(self, module_spec, module_name):
        if module_name == "linear_q_proj" and self.fused_norm_linear_impl is None:
            return module_spec or self.linear_impl
        return fused(self, module_spec, module_name)

    QKNormConfigResolver._mla_fused_linear_or_default = plain


def _patch_optimizer_loading() -> None:
    """AdamW here is torch's, which counts steps in a tensor per parameter. Loading the distributed optimizer looks for
    that tensor in the checkpoint, which has one count for all, and would share one tensor among all parameters."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    if hasattr(set_states, "__wrapped__"):
        return

    @functools.wraps(set_states)
    def without_step(self, model_param, tensors):
        hits["optimizer loading"] += 1
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step")
        set_states(self, model_param, tensors)
        state["step"] = step.clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = without_step


def _patch_unpermute() -> None:
    """On a GPU Megatron adds up the outputs of a token's experts in any order, rounding after each: no two passes have
    the same bits, so that a policy would differ from itself. In the deterministic mode it adds in order."""
    from megatron.core.transformer.moe import token_dispatcher

    stock = token_dispatcher.unpermute
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def in_order(*args, **kwargs):
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return stock(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    token_dispatcher.unpermute = in_order


def _patch_megatron() -> None:
    """Megatron's own functions that reach below `torch.cuda`."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(*args, **kwargs):
        return torch.get_rng_state()

    def set_state(new_state, *args, **kwargs):
        torch.set_rng_state(new_state)

    def to_cpu(tensor, as_numpy=False, record_stream=False):
        # gloo's all_to_all wants plain integers for its splits, as on CUDA the copy to the host gives.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    random._get_cuda_rng_state = _counted("random._get_cuda_rng_state", get_state)
    random._set_cuda_rng_state = _counted("random._set_cuda_rng_state", set_state)
    token_dispatcher.maybe_move_tensor_to_cpu = _counted("token_dispatcher.maybe_move_tensor_to_cpu", to_cpu)
