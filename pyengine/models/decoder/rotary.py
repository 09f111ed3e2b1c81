"""The frequencies of rotary embeddings, and the angles of a step, by NumPy.

Frequencies are computed in double precision and rounded once.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.models.decoder.spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotary,
    YarnScaling,
)

Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]


def frequencies(rotary: Rotary) -> tuple[Floats, float]:
    """The angle of each pair per position `[size / 2]`, and a factor on cosines and sines."""
    exponents = np.arange(0, rotary.size, 2) / rotary.exponent_size
    plain: _Doubles = 1.0 / rotary.theta**exponents
    plain[rotary.turned :] = 0.0
    scaled, attention = plain, 1.0
    match rotary.scaling:
        case LinearScaling(factor=factor):
            scaled = plain / factor
        case Llama3Scaling() as llama3:
            scaled = _llama3(plain, llama3)
        case YarnScaling() as yarn:
            scaled, attention = _yarn(plain, rotary, yarn), yarn.attention
        case LongRopeScaling(divisors=divisors):
            scaled, attention = plain / np.array(divisors), rotary.scaling.attention
    return scaled.astype(np.float32), attention


def _llama3(plain: _Doubles, scaling: Llama3Scaling) -> _Doubles:
    """Frequencies with few turns in the trained length are divided, those in between blended."""
    turns = scaling.original * plain / (2 * math.pi)
    blend = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    blended: _Doubles = (1 - blend) * plain / scaling.factor + blend * plain
    return blended


def _yarn(plain: _Doubles, rotary: Rotary, scaling: YarnScaling) -> _Doubles:
    """Pairs before a ramp keep their frequency, those after it are divided by the factor."""
    low, high = (
        _pair_with(turns, rotary, scaling) for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.exponent_size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    ramped: _Doubles = plain / scaling.factor * ramp + plain * (1 - ramp)
    return ramped


def _pair_with(turns: float, rotary: Rotary, scaling: YarnScaling) -> float:
    """The pair, as a real number, that makes `turns` turns in the trained length."""
    wavelength = scaling.original / (turns * 2 * math.pi)
    return rotary.exponent_size * math.log(wavelength) / (2 * math.log(rotary.theta))


def angles(positions: npt.NDArray[Any], inverse: Floats, attention: float) -> tuple[Floats, Floats]:
    """Cosines and sines `[T, size / 2]` at positions `[T]`, for what `frequencies` gives."""
    turned = positions.astype(np.float32)[:, None] * inverse
    factor = np.float32(attention)
    return np.cos(turned) * factor, np.sin(turned) * factor
