import pytest
import torch

from slime.training.kl import approx_kl
from tests.training import reference

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("weighted", [False, True])
def test_against_reference(kind, weighted):
    generator = torch.Generator().manual_seed(0)
    pi, ref, old = torch.randn(3, 50, generator=generator, dtype=torch.float64) * 2
    ratio = torch.exp(pi - old) if weighted else None
    want = [
        reference.kl(kind, p, r, torch.tensor(p - o).double().exp().item() if weighted else 1.0)
        for p, r, o in zip(pi.tolist(), ref.tolist(), old.tolist(), strict=True)
    ]
    torch.testing.assert_close(approx_kl(pi, ref, kind, ratio), torch.tensor(want, dtype=torch.float64))


def test_k3_gradient_is_the_derivative_and_the_ratio_carries_one():
    pi, ref = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True), torch.tensor([-1.5, -1.0]).double()
    approx_kl(pi, ref, "k3").sum().backward()
    torch.testing.assert_close(pi.grad, 1 - torch.exp(ref - pi.detach()))
    assert torch.autograd.gradcheck(lambda p: approx_kl(p, ref, "k1", torch.exp(p - ref)), (pi,))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_equal_policies_give_exact_zero_in_fp32(kind):
    x = torch.randn(100).to(torch.bfloat16)
    kl = approx_kl(x, x.clone(), kind)
    assert kl.dtype == torch.float32 and (kl == 0).all()


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown KL estimator 'k9'"):
        approx_kl(torch.zeros(1), torch.zeros(1), "k9")
