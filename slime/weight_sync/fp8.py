"""Block-wise FP8 weights, as engines and Hugging Face checkpoints have them.

A weight [M, N] becomes float8_e4m3fn values and one fp32 scale per block (DeepSeek-V3, arXiv 2412.19437, section
3.3.2): weight ~ values * scale, with scale = max |block| / 448, the largest number of e4m3. Checkpoints call the
scales of `x.weight` `x.weight_scale_inv`, of shape [ceil(M / block), ceil(N / block)].
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
SCALE_SUFFIX = "_scale_inv"
BLOCK = (128, 128)
KEPT = (
    *("embed", "lm_head", "norm", "mlp.gate.", "shared_expert_gate", "router"),
    *("eh_proj", "weights_proj", "visual", "in_proj_ba"),
)
"""Parts of the names of matrices that stay as they are: few, or too sensitive."""


def quantise(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [M, N] in float8_e4m3fn, scales [ceil(M / b0), ceil(N / b1)] in fp32) of a matrix [M, N].

    A block of zeros has the scale 1.
    """
    rows, columns = weight.shape
    tiles = _tiles(weight.float(), block)
    scales = tiles.abs().amax(dim=(1, 3)) / E4M3_MAX
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (tiles / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    values = values.reshape(tiles.shape[0] * block[0], -1)[:rows, :columns].contiguous()
    return values, scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The matrix [M, N] in fp32 that `quantise` came from, but for rounding."""
    rows, columns = values.shape
    tiles = _tiles(values.float(), block) * scales[:, None, :, None]
    return tiles.reshape(tiles.shape[0] * block[0], -1)[:rows, :columns].contiguous()


def _tiles(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[M, N] -> [blocks down, b0, blocks across, b1], with zeros at the edges."""
    rows, columns = matrix.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(matrix, (0, across * block[1] - columns, 0, down * block[0] - rows))
    return padded.view(down, block[0], across, block[1])


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def is_quantised_by_default(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a conversion turns a checkpoint's tensor into FP8: the matrices of the decoder layers."""
    return (
        len(shape) == 2 and name.endswith(".weight") and ".layers." in name and not any(part in name for part in KEPT)
    )
