"""A token's numbers are the same bits in any batch, chunk or cache, and the right ones."""

import pytest
import torch
import torch.nn.functional as F

from slime.modeling.attention import PackedSequences
from slime.modeling.batch_invariant import (
    InvariantSequences,
    _Linear,
    invariant_attention,
    make_batch_invariant,
    matmul,
)
from slime.modeling.hf import load_causal_lm

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (100, 37), (128, 2048)])
def test_rows_of_a_product_do_not_see_each_other(shape, dtype):
    torch.manual_seed(0)
    width, size = shape
    x, weight = torch.randn(150, width).to(dtype), torch.randn(size, width).to(dtype)
    whole = matmul(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=2e-2, atol=1e-4 * width)
    for start, end in ((0, 1), (31, 33), (5, 150), (149, 150)):
        assert torch.equal(matmul(x[start:end], weight), whole[start:end])
    assert matmul(x[:0], weight).shape == (0, size)


def test_gradients_of_a_linear_layer():
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 7), (3, 7), (3,)))
    assert torch.autograd.gradcheck(_Linear.apply, (x, weight, bias))


@pytest.mark.parametrize("window", [None, 7])
def test_attention_of_a_chunk_is_that_of_the_whole(window):
    torch.manual_seed(0)
    length = 75
    q, k, v = (torch.randn(1, length, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, 12)))
    positions = torch.arange(length)[None]
    whole = invariant_attention(q, k, v, positions, 0.3, window)
    age = positions[0][:, None] - positions[0]
    mask = (age >= 0) if window is None else (age >= 0) & (age < window)
    expected = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(whole.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    for start, end in ((0, 1), (74, 75), (10, 50), (31, 33)):
        # Keys of a cache: any number of them behind the last query, with anything in them.
        padded_k, padded_v = (torch.cat([x[:, :end], torch.randn(1, 40, *x.shape[2:])], 1) for x in (k, v))
        chunk = invariant_attention(q[:, start:end], padded_k, padded_v, positions[:, start:end], 0.3, window)
        assert torch.equal(chunk, whole[:, start:end])
    three = (x.repeat(3, 1, 1, 1) for x in (q, k, v))
    together = invariant_attention(*three, positions.repeat(3, 1), 0.3, window)
    assert torch.equal(together, whole.repeat(3, 1, 1, 1))


def logits(model, rows, kind):
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    out = model(torch.cat(rows)[None], position_ids=positions, attention_context=kind(lengths), use_cache=False)
    return out.logits[0].split(lengths)


def test_a_sequence_has_the_same_logits_in_any_company(tiny_model_dir):
    torch.manual_seed(0)
    rows = [torch.randint(0, 128, (n,)) for n in (5, 37, 1, 60, 33)]
    plain, model = (load_causal_lm(tiny_model_dir, torch.float32) for _ in range(2))
    make_batch_invariant(model)
    with torch.no_grad():
        together, expected = logits(model, rows, InvariantSequences), logits(plain, rows, PackedSequences)
        for i, row in enumerate(rows):
            (alone,) = logits(model, [row], InvariantSequences)
            assert torch.equal(alone, together[i])
            torch.testing.assert_close(alone, expected[i], rtol=1e-4, atol=1e-4)
            (prefix,) = logits(model, [row[: len(row) // 2 + 1]], InvariantSequences)
            assert torch.equal(prefix, together[i][: len(prefix)])


def test_gradients_are_the_usual_ones(tiny_model_dir):
    rows = [torch.randint(0, 128, (n,)) for n in (5, 37)]
    grads = []
    for kind in (PackedSequences, InvariantSequences):
        model = load_causal_lm(tiny_model_dir, torch.float64)
        if kind is InvariantSequences:
            make_batch_invariant(model)
        torch.cat(logits(model, rows, kind)).log_softmax(-1)[:, 3].sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_expert_models_are_refused():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1, vocab_size=16)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_attention_heads=2, num_key_value_heads=2, num_experts=2, **sizes))
    with pytest.raises(ValueError, match="only dense models"):
        make_batch_invariant(model)
