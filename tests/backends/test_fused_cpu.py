"""Norms and rotary embeddings of CPU training against autograd of transformers' own code in float64."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from slime.backends.fsdp_utils.fused_cpu import _RMSNorm, _Rotary, fuse_for_cpu_training
from slime.modeling.attention import PackedSequences
from slime.modeling.hf import load_causal_lm

pytestmark = pytest.mark.unit


def gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = torch.cat([x.flatten() for x in out]) if isinstance(out, tuple) else out.flatten()
    weights = torch.linspace(-1, 1, len(out), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("shape", [(1, 5, 64), (1, 37, 4, 16), (3, 24)])
def test_rms_norm(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).double() * 3, torch.randn(shape[-1]).double()
    expected = gradients(lambda x, w: torch.nn.functional.rms_norm(x, shape[-1:], w, 1e-3), x, weight)
    torch.testing.assert_close(gradients(lambda x, w: _RMSNorm.apply(x, w, 1e-3), x, weight), expected)


def test_rotary():
    torch.manual_seed(0)
    q, k = (torch.randn(1, 7, n, 32).double().transpose(1, 2) for n in (4, 2))
    angles = torch.randn(1, 7, 16).double().repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected = gradients(lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), q, k)
    torch.testing.assert_close(gradients(lambda q, k: _Rotary.apply(q, k, cos, sin), q, k), expected)


def test_model(tiny_model_dir):
    models = [load_causal_lm(tiny_model_dir, torch.float32) for _ in range(2)]
    fuse_for_cpu_training(models[1])
    changed = [m for m in models[1].modules() if "forward" in vars(m)]
    assert len(changed) == 2 * 5 + 1  # per layer four norms and the attention, and the last norm
    lengths = [9, 5, 14]
    ids = torch.randint(1, 64, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    results = []
    for model in models:
        logits = model(
            input_ids=ids, position_ids=positions, attention_context=PackedSequences(lengths), use_cache=False
        ).logits
        logits.log_softmax(-1)[..., 3].sum().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
