"""Time and peak memory of log-probs (and entropy) from hidden states: naive, slime, liger-kernel.

`python benchmarks/logprob.py --device cuda` measures forward and backward for 16,384 tokens x 151,936 vocabulary in
bf16 and writes benchmarks/results/logprob-cuda.json. `--device cpu --tokens 256 --vocab 4096` checks the script.

- naive: logits as one tensor, log_softmax in fp32, autograd.
- naive_entropy, slime_entropy: with the entropy, which RL logs at every step; it has no gradient.
- liger_loss: liger-kernel's LigerFusedLinearCrossEntropyLoss as SFT uses it: one summed loss, whose gradient forward
  computes (compare forward and backward together), the weight's in bf16 by default. No log-probs per token.
- liger: the same with reduction="none" and fp32 accumulation, as slime does: log-probs per token, which RL
  weighs. Neither has the entropy. Both need liger-kernel, a small wheel of Python files:

      pip download liger-kernel --no-deps -d .whl && unzip -q -d .whl/liger .whl/liger_kernel-*.whl
      PYTHONPATH=.whl/liger python benchmarks/logprob.py --device cuda

Memory is the peak above what inputs and their gradients take. `max_error` compares log-probs of 64 rows, and
`gradient_error` the hidden states' gradient of these rows (relative), with float64.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.environment import describe, write_result
from slime.training.logprobs import token_log_probs

Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""(hidden [R, D], weight [V, D], targets [R]) -> (loss to run backward from, log-probs [R] or None)."""
CHECKED_ROWS = 64


def naive(hidden, weight, targets, with_entropy=False):
    log_probs = torch.log_softmax((hidden @ weight.T).float(), -1)
    picked = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    if with_entropy:
        with torch.no_grad():
            torch.special.entr(log_probs.exp()).sum(-1)
    return -picked.sum(), picked


def naive_entropy(hidden, weight, targets):
    return naive(hidden, weight, targets, with_entropy=True)


def slime(hidden, weight, targets):
    picked, _ = token_log_probs(hidden, weight, targets)
    return -picked.sum(), picked


def slime_entropy(hidden, weight, targets):
    picked, _ = token_log_probs(hidden, weight, targets, with_entropy=True)
    return -picked.sum(), picked


def methods() -> dict[str, Method]:
    found: dict[str, Method] = {
        "naive": naive,
        "naive_entropy": naive_entropy,
        "slime": slime,
        "slime_entropy": slime_entropy,
    }
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        print(f"without liger-kernel: {error}", flush=True)
        return found
    total = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    each = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)

    def liger_loss(hidden, weight, targets):
        return total(weight, hidden, targets), None

    def liger(hidden, weight, targets):
        losses = each(weight, hidden, targets)
        return losses.sum(), -losses

    return {**found, "liger_loss": liger_loss, "liger": liger}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(method: Method, inputs: tuple, device: str, repeat: int, truth: tuple[torch.Tensor, torch.Tensor]) -> dict:
    hidden, weight, targets = inputs
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    forward, both = [], []
    for attempt in range(repeat + 1):
        hidden.grad.zero_()
        weight.grad.zero_()
        synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss, picked = method(hidden, weight, targets)
        synchronize(device)
        middle = time.perf_counter()
        loss.backward()
        synchronize(device)
        end = time.perf_counter()
        if attempt:  # the first one warms up
            forward.append(middle - start)
            both.append(end - start)
        if attempt < repeat:
            del loss, picked
    true_log_probs, true_grad = truth
    grad = hidden.grad[:CHECKED_ROWS].double()
    out = {
        "forward_ms": round(1e3 * min(forward), 2),
        "forward_backward_ms": round(1e3 * min(both), 2),
        "gradient_error": float((grad - true_grad).norm() / true_grad.norm()),
    }
    if picked is not None:
        out["max_error"] = float((picked.detach()[:CHECKED_ROWS].double() - true_log_probs).abs().max())
    if device == "cuda":
        out["peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)
    return out


def truth_of(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = hidden.detach()[:CHECKED_ROWS].double().requires_grad_()
    log_probs = torch.log_softmax(rows @ weight.detach().double().T, -1)
    picked = log_probs.gather(-1, targets[:CHECKED_ROWS, None]).squeeze(-1)
    (-picked.sum()).backward()
    return picked.detach(), rows.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    result = {
        "environment": describe("torch", "triton", "liger-kernel"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tokens": options.tokens,
        "vocab": options.vocab,
        "dtype": str(dtype),
        "hidden_sizes": {},
    }
    sides = methods()
    for width in options.hidden:
        torch.manual_seed(0)
        hidden = torch.randn(options.tokens, width, device=device, dtype=dtype, requires_grad=True)
        # Logits with a deviation of 3: a distribution as peaked as a language model's.
        weight = (torch.randn(options.vocab, width, device=device) * 3 / width**0.5).to(dtype).requires_grad_()
        targets = torch.randint(0, options.vocab, (options.tokens,), device=device)
        truth = truth_of(hidden, weight, targets)
        table = result["hidden_sizes"][width] = {}
        for name, method in sides.items():
            try:
                table[name] = measure(method, (hidden, weight, targets), device, options.repeat, truth)
            except torch.OutOfMemoryError:
                table[name] = {"out_of_memory": True}
            if device == "cuda":
                torch.cuda.empty_cache()
            print(width, name, table[name], flush=True)
    if not options.no_result:
        print(write_result(f"logprob-{device}", result))


if __name__ == "__main__":
    main()
