"""Random numbers without state: a hash of (seed, position), the same wherever it is asked.

A request's n-th draw depends on its seed and on n alone. So neither the other requests of the
batch, nor their order, nor a preemption in between can change it.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Positions: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
"""Places of tokens in their outputs, one per row."""

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1
_SAMPLES = 0x5851F42D4C957F2D
"""Sets the stream of samples' seeds apart from those of draws: the multiplier of Knuth's MMIX."""


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers, one to one: the finaliser of SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with
    the constants of David Stafford's variant 13. Any shape.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of the sample at `index` of a request with this seed.

    The first sample has the seed of its request. The others have elements of a SplitMix64 stream
    that depends on it, so that requests whose seeds lie close together have no sample in common.
    """
    if index == 0:
        return seed & _MASK64
    stream = mix64(seeds_of([seed ^ _SAMPLES])) + seeds_of([index]) * _GOLDEN_GAMMA
    return int(mix64(stream)[0])


def seeds_of(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return seeds as :func:`uniforms` takes them, modulo 2^64."""
    return np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)


def uniforms(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Positions
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), with 53 random bits.

    It is element ``position`` of the SplitMix64 stream that starts at ``mix64(seed)``: seeds
    that lie close together are scrambled first, as streams a multiple of the increment apart
    would be shifted copies of each other. Seeds are taken modulo 2^64.
    """
    seed_array = seeds if isinstance(seeds, np.ndarray) else seeds_of(seeds)
    position_array = np.array(positions, dtype=np.uint64)
    stream = mix64(seed_array) + (position_array + np.uint64(1)) * _GOLDEN_GAMMA
    return (mix64(stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53
