"""Long sequences attended one by one, with rounded lengths, equal the packed row."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from slime.modeling import cudnn_attention
from slime.modeling.attention import PackedSequences
from slime.modeling.cudnn_attention import LongSequences, prefers_cudnn

CASES = {"mixed": [5, 31, 3, 7, 40, 2], "long": [33], "short": [4, 6], "long last": [3, 32]}


def run(context, inputs, weights, window):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = context.attend(0, *leaves, 0.3, window)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def random(lengths, dim, **options):
    torch.manual_seed(0)
    tokens = sum(lengths)
    inputs = [torch.randn(tokens, heads, dim, **options) for heads in (4, 2, 2)]
    return inputs, torch.randn(tokens, 4, dim, **options)


@pytest.mark.unit
@pytest.mark.parametrize("window", [None, 6, 36])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_packed_row(case, window):
    lengths = CASES[case]
    inputs, weights = random(lengths, 8, dtype=torch.float64)
    expected = run(PackedSequences(lengths), inputs, weights, window)
    got = run(LongSequences(lengths, min_length=30, step=16), inputs, weights, window)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.unit
def test_the_reference_of_the_trial():
    """What cuDNN is compared with on a GPU is right itself."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, n, 9, d) for n, d in ((4, 8), (2, 8), (2, 6), (4, 6)))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3, enable_gqa=True)
    expected = [out, *torch.autograd.grad((out * grad).sum(), leaves)]
    for got, want in zip(cudnn_attention.reference(q, k, v, grad, 0.3), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.unit
def test_what_auto_means(monkeypatch):
    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert prefers_cudnn("auto", cuda, bf16, deterministic=False)
    assert not prefers_cudnn("auto", cuda, bf16, deterministic=True)
    assert not prefers_cudnn("auto", cuda, torch.float32, deterministic=False)
    assert not prefers_cudnn("auto", cpu, bf16, deterministic=False)
    assert not prefers_cudnn("slime_varlen", cuda, bf16, deterministic=False)
    assert prefers_cudnn("slime_cudnn", cpu, bf16, deterministic=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not prefers_cudnn("auto", cuda, bf16, deterministic=False)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_GPU = [300, 5000, 17, 4096]


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()


@pytest.mark.system
@gpu
def test_cudnn_on_a_gpu():
    inputs, weights = random(ON_GPU, 128, dtype=torch.bfloat16, device="cuda")
    assert cudnn_attention.works(4, 2, 128, 128, torch.bfloat16, inputs[0].device)
    expected = run(PackedSequences(ON_GPU, "cuda"), inputs, weights, None)
    got = run(LongSequences(ON_GPU, "cuda"), inputs, weights, None)
    close(got, expected)
    with torch.no_grad():  # a log-prob pass has the bits of training
        alone = LongSequences(ON_GPU, "cuda").attend(0, *inputs, 0.3, None)
    assert torch.equal(alone, got[0])


@pytest.mark.system
@gpu
def test_a_recomputed_layer_does_not_attend_again():
    inputs, weights = random(ON_GPU, 128, dtype=torch.bfloat16, device="cuda")
    context = LongSequences(ON_GPU, "cuda", keep=True)

    class Recomputed:
        def attend(self, *args):
            return checkpoint(context.attend, *args, use_reentrant=False)

    cudnn_attention.works(4, 2, 128, 128, torch.bfloat16, inputs[0].device)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        got = run(Recomputed(), inputs, weights, None)
    calls = {event.key: event.count for event in recorded.key_averages()}
    assert calls["aten::_scaled_dot_product_cudnn_attention"] == 2
    assert calls["aten::_scaled_dot_product_cudnn_attention_backward"] == 2
    close(got, run(LongSequences(ON_GPU, "cuda"), inputs, weights, None))
    assert context._kept == {}


@pytest.mark.system
@gpu
def test_heads_that_cudnn_cannot_do_stay_packed(caplog):
    """Sizes that are no multiple of 8."""
    device = torch.device("cuda", 0)
    cudnn_attention.works.cache_clear()
    assert not cudnn_attention.works(4, 2, 36, 36, torch.bfloat16, device)
    assert "long sequences stay packed" in caplog.text
