"""Fused training kernels against autograd of transformers' own code, on a GPU or in Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.backends.fsdp_utils.fused import fuse_for_training
from slime.modeling import triton_ops
from slime.modeling.attention import PackedSequences
from slime.modeling.hf import load_causal_lm

pytestmark = pytest.mark.integration

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds bf16 in its own way.
DTYPE, TOLERANCE = (torch.bfloat16, 2**-6) if DEVICE.type == "cuda" else (torch.float32, 1e-5)


def random(*shape):
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = torch.cat([x.flatten() for x in out]) if isinstance(out, tuple) else out.flatten()
    weights = torch.linspace(-1, 1, len(out), device=out.device, dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b.double()).abs().max() <= b.double().abs().max() * TOLERANCE


@pytest.mark.parametrize("shape", [(1, 5, 1024), (1, 37, 4, 128), (1, 601, 24)])
def test_rms_norm(shape, monkeypatch):
    monkeypatch.setattr(triton_ops, "PROGRAMS", 4)  # several rows each, and some without
    torch.manual_seed(0)
    x, weight = random(*shape) * 3, random(shape[-1])
    expected = gradients(
        lambda x, w: torch.nn.functional.rms_norm(x, shape[-1:], w, 1e-6), x.double(), weight.double()
    )
    assert_close(gradients(lambda x, w: triton_ops.RMSNorm.apply(x, w, 1e-6), x, weight), expected)


def test_rotary():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = (random(1, 7, n, 32).transpose(1, 2) for n in (4, 2))
    angles = torch.randn(1, 7, 16, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    expected = gradients(lambda q, k: apply_rotary_pos_emb(q, k, cos.double(), sin.double()), q.double(), k.double())
    assert_close(gradients(lambda q, k: triton_ops.Rotary.apply(q, k, cos, sin), q, k), expected)


def test_swiglu():
    torch.manual_seed(0)
    gate, up = random(3, 700) * 3, random(3, 700)
    expected = gradients(lambda g, u: torch.nn.functional.silu(g) * u, gate.double(), up.double())
    assert_close(gradients(triton_ops.SwiGLU.apply, gate, up), expected)


def loss_gradients(model):
    row = torch.arange(20, device=DEVICE)[None]
    out = model(input_ids=row, position_ids=row, attention_context=PackedSequences([20], DEVICE), use_cache=False)
    loss = out.logits.float().log_softmax(-1)[0, :-1].gather(1, row[0, 1:, None]).sum()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def test_a_whole_model(tiny_model_dir):
    plain, model = (load_causal_lm(tiny_model_dir, DTYPE, DEVICE) for _ in range(2))
    for layer in model.model.layers:
        fuse_for_training(layer)
    changed = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
    assert sorted(changed) == ["Qwen3Attention"] * 2 + ["Qwen3MLP"] * 2 + ["Qwen3RMSNorm"] * 8
    for got, expected in zip(loss_gradients(model), loss_gradients(plain), strict=True):
        assert (got - expected).abs().max() <= expected.abs().max() * 4 * TOLERANCE
