"""Fused kernels against transformers' own code, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.modeling.attention import PackedSequences
from slime.modeling.fuse import fuse
from slime.modeling.hf import load_causal_lm
from slime.modeling.triton_ops import rms_norm, rotary

pytestmark = pytest.mark.integration

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds bf16 in its own way.
DTYPE, TOLERANCE = (torch.bfloat16, 2**-7) if DEVICE.type == "cuda" else (torch.float32, 1e-5)


@pytest.mark.parametrize("shape", [(1, 5, 1024), (1, 5, 4, 128), (1, 33, 3, 24), (1, 2, 5000)])
def test_rms_norm(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).to(DTYPE) * 3
    weight = torch.randn(shape[-1], device=DEVICE).to(DTYPE)
    expected = torch.nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-6)
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == DTYPE
    assert (out - expected).abs().max() <= expected.abs().max() * TOLERANCE
    assert torch.equal(rms_norm(x[:, 1:2], weight, 1e-6), out[:, 1:2]), "a row must not depend on the others"


@pytest.mark.parametrize("heads, groups, dim", [(4, 2, 32), (5, 1, 24), (16, 8, 128)])
def test_rotary_is_bit_equal(heads, groups, dim):
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = (torch.randn(1, 7, n, dim, device=DEVICE).to(DTYPE).transpose(1, 2) for n in (heads, groups))
    cos, sin = (torch.randn(1, 7, dim, device=DEVICE).to(DTYPE) for _ in range(2))
    for expected, got in zip(apply_rotary_pos_emb(q, k, cos, sin), rotary(q, k, cos, sin), strict=True):
        assert torch.equal(expected, got)


def logits(model):
    row = torch.arange(20, device=DEVICE)[None]
    mask = torch.empty(1, 1, 1, 1, device=DEVICE)
    context = PackedSequences([20], DEVICE)
    with torch.inference_mode():
        return model(
            input_ids=row, position_ids=row, attention_mask=mask, attention_context=context, use_cache=False
        ).logits


def test_a_model_keeps_its_results_and_others_stay_as_they_are(tiny_model_dir):
    model, other = (load_causal_lm(tiny_model_dir, DTYPE, DEVICE) for _ in range(2))
    before = logits(model)
    assert fuse(model, rms_norm, rotary) == (9, 2)
    assert (logits(model) - before).abs().max() < 4 * TOLERANCE
    assert all("forward" not in vars(module) for module in other.modules())


def test_norms_that_compute_something_else_are_left_alone():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    class ShiftedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1

    norms = [Gemma2RMSNorm(64), ShiftedRMSNorm(64), Qwen3RMSNorm(64)]
    model = torch.nn.ModuleList(norms).to(DEVICE, DTYPE)
    assert fuse(model, rms_norm, rotary) == (1, 0)
    assert [("forward" in vars(norm)) for norm in model] == [False, False, True]
