"""The invariant matrix product, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.modeling.invariant_matmul import invariant_matmul

pytestmark = pytest.mark.integration
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float32] if DEVICE.type == "cuda" else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(150, 64, 130), (300, 100, 37), (3, 1024, 256)])
def test_rows_of_a_product_do_not_see_each_other(shape, dtype):
    torch.manual_seed(0)
    rows, width, size = shape
    x, weight = (torch.randn(n, width, device=DEVICE).to(dtype) for n in (rows, size))
    whole = invariant_matmul(x, weight)
    expected = x.double() @ weight.double().t()
    limit = 2**-7 if dtype == torch.bfloat16 else 1e-6
    assert (whole - expected).abs().max() <= limit * expected.abs().max()
    for start, end in ((0, 1), (rows // 2, rows), (rows - 1, rows)):
        assert torch.equal(invariant_matmul(x[start:end], weight), whole[start:end])
    assert invariant_matmul(x[:0], weight).shape == (0, size)
