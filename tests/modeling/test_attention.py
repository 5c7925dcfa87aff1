"""The shared attention gives Hugging Face's own results, packed or one by one."""

import pytest
import torch

from slime.modeling.attention import PackedSequences
from slime.modeling.hf import load_causal_lm

pytestmark = pytest.mark.unit
LENGTHS = [5, 31, 30, 1, 17]


def reference_logits(path, rows):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    return torch.cat([model(row[None]).logits[0] for row in rows])


def test_packed_row_equals_each_sequence_alone_in_stock_attention(tiny_model_dir):
    rows = [torch.randint(0, 128, (n,)) for n in LENGTHS]
    model = load_causal_lm(tiny_model_dir, torch.float64)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    logits = model(
        torch.cat(rows)[None],
        position_ids=positions[None],
        attention_context=PackedSequences(LENGTHS),
        use_cache=False,
    ).logits[0]
    torch.testing.assert_close(logits, reference_logits(tiny_model_dir, rows), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_sliding_window_sees_the_last_tokens_only(window):
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = PackedSequences(LENGTHS).attend(0, q, k, v, 0.3, window)
    start = 0
    for n in LENGTHS:
        for t in range(n):
            first = max(0, t - window + 1)
            keys, values = k[start + first : start + t + 1], v[start + first : start + t + 1]
            for head in range(4):
                weights = (keys[:, head // 2] @ q[start + t, head] * 0.3).softmax(0)
                torch.testing.assert_close(out[start + t, head], weights @ values[:, head // 2])
        start += n


def test_gradients_do_not_leak_across_sequences():
    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    PackedSequences([5, 7]).attend(0, q, k, v, 1.0, None)[:5].sum().backward()
    assert k.grad[:5].abs().sum() > 0 and torch.all(k.grad[5:] == 0) and torch.all(v.grad[5:] == 0)


def test_model_call_without_context_names_the_keyword(tiny_model_dir):
    model = load_causal_lm(tiny_model_dir, torch.float32)
    with pytest.raises(ValueError, match="attention_context"):
        model(torch.zeros(1, 3, dtype=torch.long))
