import numpy as np

from pyengine.sampling.state import mix64, sample_seed, uniforms

GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    """The published first outputs of SplitMix64 with the seeds 0 and 1234567."""
    with np.errstate(over="ignore"):
        steps = np.arange(1, 4, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
        assert [f"{x:016x}" for x in mix64(steps).tolist()] == [
            "e220a8397b1dcdaf",
            "6e789e6aa1b965f4",
            "06c45d188009454f",
        ]
        assert mix64(steps + np.uint64(1234567)).tolist() == [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
        ]


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def scalar_uniform(seed: int, position: int) -> float:
    return (mix((mix(seed % 2**64) + (position + 1) * GOLDEN_GAMMA) % 2**64) >> 11) / 2**53


def test_uniforms_against_python_integers() -> None:
    cases = [(0, 0), (0, 1), (1, 0), (-1, 5), (2**64 - 1, 5), (2**63, 10**6), (-(2**63), 0)]
    seeds, positions = zip(*cases, strict=True)
    got = uniforms(seeds, positions).tolist()
    assert got == [scalar_uniform(*case) for case in cases]
    assert got[3] == got[4]  # seeds are taken modulo 2^64


def test_uniforms_are_uniform_along_positions_and_along_seeds() -> None:
    count, bins = 20_000, 20
    for seeds, positions in (
        ([3] * count, list(range(count))),
        (list(range(count)), [3] * count),
        ([GOLDEN_GAMMA * seed for seed in range(count)], [0] * count),
    ):
        numbers = uniforms(seeds, positions)
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed, _ = np.histogram(numbers, bins=bins, range=(0, 1))
        chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_streams_of_neighbouring_seeds_share_nothing() -> None:
    streams = [set(uniforms([seed] * 1000, range(1000)).tolist()) for seed in range(4)]
    assert len(set().union(*streams)) == 4000


def test_no_numbers() -> None:
    assert uniforms([], []).shape == (0,)


def test_seeds_of_samples_are_those_of_no_other_requests_samples() -> None:
    """Also of seeds that lie close together or a multiple of the increment apart."""
    near = [*range(-200, 200), 2**63 - 1, 2**64 - 1]
    shifted = [(GOLDEN_GAMMA * at + 7) % 2**64 for at in range(300)]
    seeds = {seed % 2**64 for seed in [*near, *shifted]}
    derived = [sample_seed(seed, index) for seed in seeds for index in range(64)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= item < 2**64 for item in derived)
    numbers = uniforms(derived, [0] * len(derived)).tolist()
    assert len(set(numbers)) == len(numbers)
    observed, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((observed - len(numbers) / 20) ** 2 / (len(numbers) / 20)).sum() < 43.8


def test_the_first_sample_has_the_seed_of_its_request() -> None:
    for seed in (0, 1, 7, 2**63, -1):
        assert sample_seed(seed, 0) == seed % 2**64
        assert sample_seed(seed - 2**64, 5) == sample_seed(seed, 5)


def test_seeds_of_samples_stay_the_same() -> None:
    """Results of a seed are compared between versions: vectors, computed by Python's integers."""
    for seed in (0, 1, 2, 2**63):
        for index in (1, 2, 15):
            assert sample_seed(seed, index) == mix(
                (mix(seed ^ 0x5851F42D4C957F2D) + index * GOLDEN_GAMMA) % 2**64
            )
