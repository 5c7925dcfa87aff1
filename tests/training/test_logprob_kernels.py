"""Kernels of the log-prob computation against float64, on a GPU or in Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.training import logprob_kernels as kernels

pytestmark = pytest.mark.integration

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds bf16 in its own way.
DTYPE, ROUNDING = (torch.bfloat16, 2**-8) if DEVICE.type == "cuda" else (torch.float32, 1e-5)
ROWS, VOCAB = 6, kernels.BLOCK + 37


def problem():
    """Logits of all kinds: usual, peaked, equal, huge, and with most tokens ruled out."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB) * torch.tensor([1.0, 8.0, 0.0, 30.0, 3.0, 3.0])[:, None]
    logits[3] += 1000
    targets = torch.randint(0, VOCAB, (ROWS,))
    targets[0] = VOCAB - 1
    allowed = torch.rand(2, VOCAB) < 0.001
    allowed[torch.arange(2), targets[4:]] = True
    allowed[1] = torch.arange(VOCAB) == targets[5]  # the target alone
    logits[4:] = logits[4:].masked_fill(~allowed, -torch.inf)
    return logits.to(DEVICE, DTYPE), targets.to(DEVICE), torch.randn(2, ROWS, device=DEVICE)


def reference(logits, targets, temperature, grads, entropy_grad):
    z = logits.double().requires_grad_()
    log_probs = torch.log_softmax(z / temperature, -1)
    finite = log_probs.masked_fill(log_probs.isinf(), 0.0)
    entropy = -(log_probs.exp() * finite).sum(-1)
    picked = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    loss = (picked * grads[0]).sum() + (entropy * grads[1]).sum() * entropy_grad
    loss.backward()
    return picked.detach(), entropy.detach(), z.grad.nan_to_num(0.0)


def run_forward(logits, targets, temperature, with_entropy=True):
    log_probs, entropy, log_sums = (torch.empty(ROWS, device=DEVICE) for _ in range(3))
    kernels.forward(logits, targets, temperature, log_probs, entropy if with_entropy else None, log_sums)
    return log_probs, entropy, log_sums


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_float64(temperature, entropy_grad):
    logits, targets, grads = problem()
    want_log_probs, want_entropy, want_grad = reference(logits, targets, temperature, grads, entropy_grad)
    log_probs, entropy, log_sums = run_forward(logits, targets, temperature)
    torch.testing.assert_close(log_probs.double(), want_log_probs, rtol=1e-5, atol=2e-4)  # fp32 at 1000
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    given = (entropy, grads[1]) if entropy_grad else (None, None)
    out = torch.empty_like(logits)
    kernels.backward(logits, targets, temperature, log_sums, grads[0], *given, out)
    usual = [0, 1, 2, 4, 5]
    for row in usual:
        error = (out[row].double() - want_grad[row]).abs().max()
        assert error <= want_grad[row].abs().max() * ROUNDING + 1e-6, row
    torch.testing.assert_close(out[3].double(), want_grad[3], rtol=1e-2, atol=1e-3)
    assert not out[4:][logits[4:].isinf()].any()
    kernels.backward(logits, targets, temperature, log_sums, grads[0], *given, logits)
    assert torch.equal(logits, out)


def test_the_same_bits_without_the_entropy_and_in_any_company():
    logits, targets, _ = problem()
    log_probs, _, log_sums = run_forward(logits, targets, 0.7)
    alone, _, alone_sums = run_forward(logits, targets, 0.7, with_entropy=False)
    assert torch.equal(alone, log_probs) and torch.equal(alone_sums, log_sums)
    wide = torch.randn(ROWS, 2 * VOCAB, device=DEVICE).to(DTYPE)
    wide[:, :VOCAB] = logits
    assert torch.equal(run_forward(wide[:, :VOCAB], targets, 0.7)[0], log_probs)


def test_no_rows():
    empty = torch.empty(0, device=DEVICE)
    logits, targets = torch.empty(0, VOCAB, device=DEVICE), torch.empty(0, device=DEVICE, dtype=torch.int64)
    kernels.forward(logits, targets, 1.0, empty, None, empty)
    kernels.backward(logits, targets, 1.0, empty, empty, None, None, logits)
