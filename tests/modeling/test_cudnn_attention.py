"""Long sequences attended one by one, with rounded lengths, equal the packed row."""

import pytest
import torch

from slime.modeling.attention import PackedSequences
from slime.modeling.cudnn_attention import LongSequences

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


@pytest.mark.system
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cudnn_on_a_gpu():
    lengths = [300, 5000, 17, 4096]
    inputs, weights = random(lengths, 128, dtype=torch.bfloat16, device="cuda")
    expected = run(PackedSequences(lengths, "cuda"), inputs, weights, None)
    got = run(LongSequences(lengths, "cuda"), inputs, weights, None)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()
