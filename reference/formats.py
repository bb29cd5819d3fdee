"""Number formats of the indexer, as codecs on integers: e2m1 with ue8m0 block exponents (fp4), and e4m3fn (fp8).

Everything is computed from exponent bits and exact float64 steps, so the results do not depend on the torch version, on
the device or on torch's own float8 casts (which saturate above 464 in some releases and give NaN in others).
"""

import functools

import torch
from torch import Tensor

BLOCK = 32
"""Channels that share one fp4 exponent."""

E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by code; code bit 3 is the sign."""

E4M3_MAX = 448.0
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
"""Published floor of a block's largest magnitude: it keeps the exponent at or above -126."""
FP8_AMAX_FLOOR = 1e-4
"""Published floor of a row's largest magnitude (used after narrowing to float32)."""

# Nearest, ties to the even code: a magnitude reaches code i + 1 past the i-th midpoint, or on it when i + 1 is even.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pow2(exponent: Tensor) -> Tensor:
    """2**exponent as float64, exact for integer exponents in [-1022, 1023] (built from bits, not by exp2)."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to float32 or bfloat16 once, to nearest, ties to even.

    torch narrows float64 to bfloat16 by way of float32, which rounds twice; here the intermediate is rounded to odd, so
    that it stays on the right side of every tie.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"round_to: x must be float64, got {x.dtype}")
    single = x.to(torch.float32)
    if dtype == torch.float32:
        return single
    if dtype != torch.bfloat16:
        raise TypeError(f"round_to: dtype must be float32 or bfloat16, got {dtype}")
    wide = single.to(torch.float64)
    inexact = (wide != x) & ~torch.isnan(x)
    bits = single.view(torch.int32) - (inexact & (wide.abs() > x.abs())).to(torch.int32)
    return (bits | inexact.to(torch.int32)).view(torch.float32).to(torch.bfloat16)


def ceil_log2(x: Tensor) -> Tensor:
    """Smallest integer e with 2**e >= x, as int32; x float32, positive and normal (read from its bit pattern)."""
    bits = _float32("ceil_log2", "x", x).view(torch.int32)
    return ((bits >> 23) & 0xFF) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def e2m1_encode(x: Tensor) -> Tensor:
    """Codes (uint8, 0..15) of the e2m1 values nearest to x, any float dtype; ties to the even code, saturating at 6.

    The sign of zero is kept: -0.1 becomes code 8, which is -0. NaN becomes code 7, as NVIDIA's conversion has it.
    """
    _floating("e2m1_encode", "x", x)
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for i, midpoint in enumerate(_E2M1_MIDPOINTS):
        code += (magnitude >= midpoint) if i % 2 else (magnitude > midpoint)
    code |= torch.signbit(x).to(torch.uint8) << 3
    return torch.where(torch.isnan(x), torch.full_like(code, 7), code)


def e2m1_decode(codes: Tensor) -> Tensor:
    """float32 values of e2m1 codes (uint8, 0..15)."""
    _uint8("e2m1_decode", "codes", codes)
    return _e2m1_table(codes.device)[codes.long()]


def e2m1_pack(codes: Tensor) -> Tensor:
    """Codes [..., 2n] to bytes [..., n], the even channel in the low nibble."""
    _uint8("e2m1_pack", "codes", codes)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_unpack(packed: Tensor) -> Tensor:
    """Bytes [..., n] to codes [..., 2n]; the inverse of `e2m1_pack`."""
    _uint8("e2m1_unpack", "packed", packed)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def fp4_exponent(amax: Tensor) -> Tensor:
    """Published block exponent (int16) of a largest magnitude: ceil(log2(f32(max(amax, 6 * 2**-126) * f32(1/6)))).

    amax is float32 or bfloat16, finite. For bfloat16 m * 2**q with 1 <= m < 2 it is q - 2 if m <= 1.5 and q - 1 above.
    """
    amax = _floating("fp4_exponent", "amax", amax).to(torch.float32)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32, device=amax.device)
    return ceil_log2(amax.clamp_min(FP4_AMAX_FLOOR) * sixth).to(torch.int16)


def fp4_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Published fp4 quantiser: x [..., D], D a multiple of 32 -> codes uint8 [..., D], exponents int16 [..., D/32]."""
    _floating("fp4_encode", "x", x)
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"fp4_encode: the last dimension of x must be a multiple of {BLOCK}, got shape {tuple(x.shape)}"
        )
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    exponent = fp4_exponent(_finite_amax("fp4_encode", blocks))
    # float64, so that the division by a power of two is exact even for subnormal results.
    codes = e2m1_encode(blocks.to(torch.float64) * pow2(-exponent.to(torch.int32))[..., None])
    return codes.flatten(-2), exponent


def fp4_decode(codes: Tensor, exponents: Tensor) -> Tensor:
    """float64 values e2m1 * 2**e from codes uint8 [..., D] and exponents [..., D/32]; exact."""
    values = e2m1_decode(codes).to(torch.float64).unflatten(-1, (exponents.shape[-1], -1))
    return (values * pow2(exponents.to(torch.int32))[..., None]).flatten(-2)


def fp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Published fp4 fake-quantisation of x [..., D] (bfloat16 or float32), blocks of 32 consecutive channels.

    Returns the dequantised values (bfloat16 [..., D], exactly on the grid) and the exponents (int16 [..., D/32]).
    Raises ValueError for a non-finite element: the published code defines no result for it.
    """
    codes, exponents = fp4_encode(x)
    return fp4_decode(codes, exponents).to(torch.bfloat16), exponents


def e4m3_encode(x: Tensor) -> Tensor:
    """e4m3fn bytes (uint8) of float values: nearest, ties to even, saturating at 448; NaN becomes 0x7F or 0xFF."""
    _floating("e4m3_encode", "x", x)
    wide = x.to(torch.float64)
    nan = torch.isnan(wide)
    magnitude = torch.where(nan, torch.zeros_like(wide), wide.abs()).clamp_max(E4M3_MAX)
    # The binade's exponent, not below the smallest normal's: subnormals share its quantum 2**-9.
    # frexp gives zero the exponent 0, which is no binade of its own.
    binade = torch.where(magnitude == 0, -6, torch.frexp(magnitude)[1] - 1).clamp_min(-6)
    steps = torch.round(magnitude * pow2(3 - binade)).to(torch.int32)
    # 8 steps make a binade; a mantissa that rounds up to 16 steps carries into the exponent field by itself.
    code = torch.where(nan, torch.full_like(steps, 0x7F), steps + (binade + 6) * 8)
    return (code + torch.signbit(x).to(torch.int32) * 0x80).to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """float32 values of e4m3fn codes (uint8 or float8_e4m3fn); 0x7F and 0xFF are NaN."""
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    _uint8("e4m3_decode", "codes", codes)
    return _e4m3_table(codes.device)[codes.long()]


def ue8m0_encode(exponents: Tensor) -> Tensor:
    """Scale bytes (uint8) of integer exponents in [-127, 127]: e + 127."""
    if exponents.is_floating_point():
        raise TypeError(f"ue8m0_encode: exponents must be integers, got {exponents.dtype}")
    if exponents.numel() and (int(exponents.min()) < -127 or int(exponents.max()) > 127):
        raise ValueError(
            f"ue8m0_encode: exponents must lie in [-127, 127], got {int(exponents.min())} to {int(exponents.max())}"
        )
    return (exponents.to(torch.int32) + 127).to(torch.uint8)


def ue8m0_decode(codes: Tensor) -> Tensor:
    """float32 scales 2**(code - 127) of scale bytes (uint8); code 255 is NaN, code 0 the subnormal 2**-127."""
    _uint8("ue8m0_decode", "codes", codes)
    scale = pow2(codes.to(torch.int32) - 127).to(torch.float32)
    return torch.where(codes == 255, torch.full_like(scale, torch.nan), scale)


def fp8_amax_scale(x: Tensor) -> Tensor:
    """Row scale f32(max(amax, 1e-4) / 448) of x [..., D] -> float32 [...]; the rule of serving engines' fp8 stores."""
    amax = _finite_amax("fp8_amax_scale", _floating("fp8_amax_scale", "x", x)).to(torch.float32)
    # By a tensor: on CUDA, torch divides by a number by multiplying with its rounded inverse.
    return amax.clamp_min(FP8_AMAX_FLOOR) / torch.tensor(E4M3_MAX, dtype=torch.float32, device=amax.device)


def fp8_pow2_exponent(x: Tensor) -> Tensor:
    """Published exponent ceil(log2(f32(max(amax, 1e-4) * f32(1/448)))) of x [..., D] -> int32 [...]."""
    amax = _finite_amax("fp8_pow2_exponent", _floating("fp8_pow2_exponent", "x", x)).to(torch.float32)
    inverse = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32, device=x.device)
    return ceil_log2(amax.clamp_min(FP8_AMAX_FLOOR) * inverse)


def fp8_pow2_scale(x: Tensor) -> Tensor:
    """Power-of-two row scale of x [..., D] -> float32 [...]; the published rule for activations."""
    return pow2(fp8_pow2_exponent(x)).to(torch.float32)


def fp8_quantise(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 bytes (uint8 [..., D]) of f32(x / scale), x [..., D], scale float32 [...], saturating at 448."""
    return e4m3_encode(x.to(torch.float32) / _float32("fp8_quantise", "scale", scale)[..., None])


def _finite_amax(function: str, x: Tensor) -> Tensor:
    amax = x.abs().amax(dim=-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(f"{function}: x must be finite, got inf or NaN")
    return amax


@functools.lru_cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)], dtype=torch.float32, device=device)


@functools.lru_cache
def _e4m3_table(device: torch.device) -> Tensor:
    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        if code & 0x7F == 0x7F:
            magnitude = torch.nan
        elif exponent == 0:
            magnitude = mantissa * 2.0**-9
        else:
            magnitude = (8 + mantissa) * 2.0 ** (exponent - 10)
        return -magnitude if code & 0x80 else magnitude

    return torch.tensor([value(code) for code in range(256)], dtype=torch.float32, device=device)


def _floating(function: str, name: str, x: Tensor) -> Tensor:
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{function}: {name} must be bfloat16, float32 or float64, got {x.dtype}")
    return x


def _float32(function: str, name: str, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"{function}: {name} must be float32, got {x.dtype}")
    return x


def _uint8(function: str, name: str, x: Tensor) -> Tensor:
    if x.dtype != torch.uint8:
        raise TypeError(f"{function}: {name} must be uint8, got {x.dtype}")
    return x
