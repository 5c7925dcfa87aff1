"""Attention for recomputed layers on a GPU: the second forward computes nothing and the gradients are the same."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from slime.modeling.attention import PackedSequences
from slime.modeling.kept_attention import KeptAttention

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = [300, 1, 77, 1024]


def run(context, window, value_dim, recompute, head_dim=64):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(LENGTHS), n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, d in ((8, head_dim), (2, head_dim), (2, value_dim))
    )

    def layer(q, k, v):
        return context.attend(0, q * 1.5, k * 0.7, v, 0.11, window)

    out = checkpoint(layer, q, k, v, use_reentrant=False) if recompute else layer(q, k, v)
    weights = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (64, 48), (12, 12), (20, 26)])
@pytest.mark.parametrize("window", [None, 33])
def test_gradients_of_kept_attention(window, head_dim, value_dim):
    expected = run(PackedSequences(LENGTHS, "cuda"), window, value_dim, recompute=False, head_dim=head_dim)
    kept = KeptAttention(LENGTHS, "cuda")
    got = run(kept, window, value_dim, recompute=True, head_dim=head_dim)
    assert torch.equal(got[0], expected[0])
    assert kept._kept == {}
    for a, b in zip(got[1:], expected[1:], strict=True):  # the kernel's backward adds in any order
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()


def test_recomputation_does_not_attend_again():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run(KeptAttention(LENGTHS, "cuda"), None, 64, recompute=True)
    calls = {event.key: event.count for event in recorded.key_averages()}
    assert calls["aten::_flash_attention_forward"] == 1 and calls["aten::_flash_attention_backward"] == 1


def test_without_gradients_nothing_is_kept():
    kept = KeptAttention(LENGTHS, "cuda")
    with torch.no_grad():
        run_forward = torch.randn(sum(LENGTHS), 2, 64, device="cuda", dtype=torch.bfloat16)
        kept.attend(0, run_forward, run_forward, run_forward, 0.1, None)
    assert kept._kept == {}
