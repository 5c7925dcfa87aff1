"""Bucket plans: order, size, dtypes; metadata that unpacks to the tensors."""

import pytest
import torch

from slime.weight_sync.buckets import Bucket, TensorSpec, plan_buckets

pytestmark = pytest.mark.unit


def specs(*entries):
    return [TensorSpec(name, shape, dtype) for name, shape, dtype in entries]


def names(buckets):
    return [[spec.name for spec in bucket.specs] for bucket in buckets]


def test_order_is_kept_and_the_size_respected():
    plan = plan_buckets(specs(*((f"w{i}", (10,), torch.float32) for i in range(7))), max_bytes=120)
    assert names(plan) == [["w0", "w1", "w2"], ["w3", "w4", "w5"], ["w6"]]
    assert [bucket.nbytes for bucket in plan] == [120, 120, 40]


def test_an_oversize_tensor_travels_alone():
    plan = plan_buckets(
        specs(("a", (5,), torch.float32), ("big", (100, 2), torch.float32), ("b", (5,), torch.float32)), max_bytes=64
    )
    assert names(plan) == [["a"], ["big"], ["b"]]


def test_one_dtype_per_bucket():
    plan = plan_buckets(
        specs(
            ("a", (4,), torch.bfloat16),
            ("scale", (2,), torch.float32),
            ("b", (4,), torch.bfloat16),
            ("c", (4,), torch.bfloat16),
            ("scale2", (2,), torch.float32),
        ),
        max_bytes=16,
    )
    assert names(plan) == [["a", "b"], ["scale", "scale2"], ["c"]]
    assert [bucket.dtype for bucket in plan] == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_plans_are_the_same_on_every_rank():
    entries = specs(*((f"w{i}", (i % 5 + 1, 3), (torch.float32, torch.bfloat16)[i % 2]) for i in range(40)))
    plans = [plan_buckets(list(entries), 100) for _ in range(2)]
    assert plans[0] == plans[1]
    assert sorted(spec.name for bucket in plans[0] for spec in bucket.specs) == sorted(s.name for s in entries)
    assert all(bucket.nbytes <= 100 for bucket in plans[0])


def test_views_and_metadata_agree():
    bucket = Bucket(
        tuple(specs(("a", (2, 3), torch.float32), ("scalar", (), torch.float32), ("b", (4,), torch.float32)))
    )
    flat = torch.arange(11.0)
    for view, entry in zip(bucket.views(flat), bucket.metadata(), strict=True):
        assert torch.equal(view, flat[entry.start_idx : entry.end_idx].view(entry.shape))
        assert entry.numel == view.numel() and entry.dtype == view.dtype
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize(("entries", "size", "named"), [((("a", (1,)), ("a", (1,))), 8, "'a'"), ((), 0, "--update")])
def test_errors(entries, size, named):
    with pytest.raises(ValueError, match=named):
        plan_buckets([TensorSpec(name, shape, torch.float32) for name, shape in entries], size)
