"""Rotary embedding as published: float32 frequencies with YaRN, one float32 angle, adjacent pairs, one rounding.

Tables are always built on the CPU: a GPU's sine and cosine have other last bits than the C library's.
"""

import math

import torch
from torch import Tensor

from reference.config import IndexerConfig


def inv_freq(config: IndexerConfig) -> Tensor:
    """Angle per position of each pair, float32 [32], with YaRN's interpolation (no attention factor)."""
    half = config.rope_dim // 2
    # The powers in double, narrowed once: the published float32 powers, without depending on a library's powf.
    powers = [config.rope_theta ** (2 * i / config.rope_dim) for i in range(half)]
    plain = 1.0 / torch.tensor(powers, dtype=torch.float32)
    low = max(math.floor(_turning_pair(config, config.beta_fast)), 0)
    high = min(math.ceil(_turning_pair(config, config.beta_slow)), config.rope_dim - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low if high > low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / config.rope_factor * (1 - keep) + plain * keep


def rope_rows(config: IndexerConfig, positions: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Table rows of integer positions [n]: float32 [n, 64] as 32 (cos, sin) pairs, by default on their device."""
    angle = torch.outer(positions.to("cpu", torch.float32), inv_freq(config))
    # polar goes through the C library's cosf and sinf; torch.cos and torch.sin differ from them in the last place.
    turned = torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return turned.to(positions.device if device is None else device)


def rope_table(config: IndexerConfig, max_position: int, device: torch.device | str = "cpu") -> Tensor:
    """Table of positions 0 .. max_position - 1: float32 [max_position, 64] as 32 (cos, sin) pairs."""
    if max_position < 0:
        raise ValueError(f"rope_table: max_position must not be negative, got {max_position}")
    return rope_rows(config, torch.arange(max_position), device)


def apply_rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate the last 64 of x (bfloat16 [..., 128]) by table rows; positions (integers) broadcast to x.shape[:-1]."""
    return rotate(x, table[positions.long()])


def rotate(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate the last 64 of x (bfloat16 [..., 128]) by (cos, sin) rows (float32 [..., 64], broadcast).

    Pairs are adjacent channels. re' = bf16(f32(re c) - f32(im s)) and im' = bf16(f32(re s) + f32(im c)), each product
    and each sum rounded to float32 by itself, as a CPU computes the published complex product.
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(f"rotate: x must be bfloat16, got {x.dtype}")
    if rows.dtype != torch.float32:
        raise TypeError(f"rotate: rows must be float32, got {rows.dtype}")
    width = rows.shape[-1]
    keep, turn = x[..., :-width], x[..., -width:].to(torch.float32)
    re, im, cos, sin = turn[..., 0::2], turn[..., 1::2], rows[..., 0::2], rows[..., 1::2]
    turned = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)
    return torch.cat((keep, turned.to(torch.bfloat16)), dim=-1)


def _turning_pair(config: IndexerConfig, turns: float) -> float:
    """Index (a real number) of the pair that makes `turns` turns over the original context."""
    ratio = config.original_seq_len / (turns * 2 * math.pi)
    return config.rope_dim * math.log(ratio) / (2 * math.log(config.rope_theta))
