"""Triton kernels over paged KV: store new keys and values, attend from one query per sequence.

Attention splits the keys into pieces of fixed length, so that a result depends neither on the batch nor on how many
pieces the longest sequence has (flash decoding, Dao et al. 2023, with fixed splits).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLIT = 512
"""Keys that one program attends to."""
TILE = 64


@triton.jit
def _store_kernel(
    KEY,
    VALUE,
    SLOTS,
    KEY_CACHE,
    VALUE_CACHE,
    key_stride_t,
    key_stride_g,
    value_stride_t,
    value_stride_g,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    GDK: tl.constexpr,
    GDV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token).to(tl.int64)
    i = tl.arange(0, GDK)
    ok = i < G * DK
    x = tl.load(KEY + token * key_stride_t + (i // DK) * key_stride_g + i % DK, mask=ok)
    tl.store(KEY_CACHE + slot * (G * DK) + i, x, mask=ok)
    i = tl.arange(0, GDV)
    ok = i < G * DV
    x = tl.load(VALUE + token * value_stride_t + (i // DV) * value_stride_g + i % DV, mask=ok)
    tl.store(VALUE_CACHE + slot * (G * DV) + i, x, mask=ok)


@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    QUERY,
    KEY_CACHE,
    VALUE_CACHE,
    TABLE,
    LENGTHS,
    PARTIAL,
    LSE,
    scale_log2,
    query_stride_b,
    query_stride_h,
    table_stride,
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    TILE_LEN: tl.constexpr,
    RP: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
):
    """One sequence, one KV head, one piece of the keys; all query heads of the KV head together."""
    seq = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    split = tl.program_id(2)
    R: tl.constexpr = H // G
    length = tl.load(LENGTHS + seq)
    first = split * SPLIT_LEN
    end = tl.minimum(length, first + SPLIT_LEN)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    r = tl.arange(0, RP)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    head = group * R + r
    q = tl.load(
        QUERY + seq * query_stride_b + head[:, None] * query_stride_h + dk[None, :],
        mask=(r < R)[:, None] & (dk < DK)[None, :],
        other=0.0,
    )
    best = tl.full([RP], -float("inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, DVP], tl.float32)
    begin = tl.maximum(first, (low // TILE_LEN) * TILE_LEN)
    for start in range(begin, end, TILE_LEN):
        pos = start + tl.arange(0, TILE_LEN)
        seen = (pos < end) & (pos >= low)
        block = tl.load(TABLE + seq * table_stride + pos // PAGE, mask=pos < end, other=0).to(tl.int64)
        row = (block * PAGE + pos % PAGE) * G + group
        k = tl.load(KEY_CACHE + row[:, None] * DK + dk[None, :], mask=seen[:, None] & (dk < DK)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2
        s = tl.where(seen[None, :], s, -float("inf"))
        higher = tl.maximum(best, tl.max(s, 1))
        # A tile before the window has nothing to see: keep exp2 away from -inf - -inf.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(best - base)
        v = tl.load(VALUE_CACHE + row[:, None] * DV + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        total = total * fade + tl.sum(p, 1)
        best = higher
    empty = total == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    place = (seq * H + head) * splits + split
    ok = (r < R)[:, None] & (dv < DV)[None, :]
    tl.store(PARTIAL + place[:, None] * DV + dv[None, :], acc.to(PARTIAL.dtype.element_ty), mask=ok)
    if splits > 1:
        lse = tl.where(empty, -float("inf"), best + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(LSE + place, lse, mask=r < R)


@triton.jit(do_not_specialize=["splits"])
def _reduce_kernel(PARTIAL, LSE, OUT, splits, DV: tl.constexpr, DVP: tl.constexpr):
    """Join the pieces of one head of one sequence, one after the other: further, empty pieces change no bit."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, DVP)
    best = -float("inf")
    for split in range(splits):
        best = tl.maximum(best, tl.load(LSE + row * splits + split))
    total = 0.0
    acc = tl.zeros([DVP], tl.float32)
    for split in range(splits):
        weight = tl.exp2(tl.load(LSE + row * splits + split) - best)
        total += weight
        acc += weight * tl.load(PARTIAL + (row * splits + split) * DV + dv, mask=dv < DV, other=0.0)
    # Correctly rounded, so that a single piece (weight 1) stays as it is.
    out = tl.div_rn(acc, tl.zeros([DVP], tl.float32) + total)
    tl.store(OUT + row * DV + dv, out.to(OUT.dtype.element_ty), mask=dv < DV)


def store_kv(
    key_TGD: torch.Tensor, value_TGD: torch.Tensor, slots_T: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write row tokens into the cache tensors [blocks, page, G, D] at their slots."""
    tokens, groups, dk = key_TGD.shape
    dv = value_TGD.shape[2]
    # The last dimension is contiguous in what the models hand over; the others need not be.
    key_TGD, value_TGD = (x if x.stride(-1) == 1 else x.contiguous() for x in (key_TGD, value_TGD))
    _store_kernel[(tokens,)](
        key_TGD,
        value_TGD,
        slots_T,
        keys,
        values,
        key_TGD.stride(0),
        key_TGD.stride(1),
        value_TGD.stride(0),
        value_TGD.stride(1),
        G=groups,
        DK=dk,
        DV=dv,
        GDK=triton.next_power_of_2(groups * dk),
        GDV=triton.next_power_of_2(groups * dv),
    )


def paged_decode(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    splits: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention [B, H, Dv] of one query per sequence over its `lengths_B` <= splits * SPLIT cached keys."""
    batch, heads, dk = query_BHD.shape
    page, groups = keys.shape[1], keys.shape[2]
    dv = values.shape[3]
    query_BHD = query_BHD if query_BHD.stride(-1) == 1 else query_BHD.contiguous()
    out = query_BHD.new_empty(batch, heads, dv)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(batch, heads, splits, dv, dtype=torch.float32, device=out.device)
        lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=out.device)
    _decode_kernel[(batch, groups, splits)](
        query_BHD,
        keys,
        values,
        table_BN,
        lengths_B,
        partial,
        lse,
        scale * 1.4426950408889634,
        query_BHD.stride(0),
        query_BHD.stride(1),
        table_BN.stride(0),
        splits,
        H=heads,
        G=groups,
        DK=dk,
        DV=dv,
        PAGE=page,
        WINDOW=window or 0,
        SPLIT_LEN=SPLIT,
        TILE_LEN=TILE,
        RP=max(16, triton.next_power_of_2(heads // groups)),
        DKP=max(16, triton.next_power_of_2(dk)),
        DVP=max(16, triton.next_power_of_2(dv)),
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _reduce_kernel[(batch * heads,)](
            partial,
            lse,
            out,
            splits,
            DV=dv,
            DVP=triton.next_power_of_2(dv),
        )
    return out
