"""Mixers that keep a state of fixed size per sequence, as data: see `spec`.

Sizes are numbers of elements. Each mixer says which arrays a slot of its state has (`state`).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pyengine.errors import ModelLoadError
from pyengine.kv_cache.states import StateArray, StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNorm:
    """`norm(x) * activation(gate)`, or `norm(x * activation(gate))` if it `gates_first`.

    The norm is that of the root mean square, over `size` elements at a time.
    """

    size: int
    eps: float
    activation: Literal["silu", "sigmoid"] = "silu"
    gates_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A causal convolution of each channel for itself, over `size` positions, and an activation."""

    channels: int
    size: int
    activation: Literal["silu"] | None = "silu"
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ModelLoadError(f"a convolution over {self.size} positions keeps no state")

    @property
    def state(self) -> StateArray:
        """Its inputs at the last positions, the newest last."""
        return StateArray((self.size - 1, self.channels), "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """The gated delta rule (arXiv 2412.06464) behind a convolution of queries, keys and values.

    - Value head h reads key head `h // (value_heads / key_heads)`; with `tiled_heads` it reads
      `h % key_heads`.
    - `norm`: of each value head, with a gate. `beta_scale`: a factor on the learning rate.
    - `has_logs`: the file has the logarithms of decay rates; else the rates, which are negative.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int
    norm: GatedNorm
    beta_scale: float = 1.0
    tiled_heads: bool = False
    has_logs: bool = True

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelLoadError(
                f"linear_num_value_heads={self.value_heads} is not a multiple of "
                f"linear_num_key_heads={self.key_heads}: value heads share keys evenly"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The elements of a token's queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def conv(self) -> Convolution:
        """The convolution of queries, keys and values."""
        return Convolution(channels=sum(self.sizes), size=self.convolution)

    @property
    def state(self) -> StateSpec:
        """A matrix for each value head."""
        shape = (self.value_heads, self.key_dim, self.value_dim)
        return StateSpec(self.conv.state, StateArray(shape, "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaAttention:
    """Kimi's delta attention (arXiv 2510.26692): a delta rule whose decay differs by channel.

    Decay and gate are products of two matrices, with `head_dim` numbers between them.
    """

    heads: int
    head_dim: int
    convolution: int
    norm: GatedNorm

    @property
    def width(self) -> int:
        """The elements of a token's queries; keys and values have as many."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> Convolution:
        """The convolution of queries, keys and values."""
        return Convolution(channels=3 * self.width, size=self.convolution)

    @property
    def state(self) -> StateSpec:
        """A matrix for each head."""
        shape = (self.heads, self.head_dim, self.head_dim)
        return StateSpec(self.conv.state, StateArray(shape, "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2 (arXiv 2405.21060): a state space with one decay for each head.

    - `groups`: as many heads in a row share what writes and reads the state (B and C).
    - `norm`: of the result, with a gate; None: a gate alone.
    - `has_bias`: of the first matrix. `out_bias`: of the last one.
    - `scales`: factors on the outputs of the first matrix: gate, x, B, C and time steps.
    - `input_scale`, `output_scale`: factors on rows before and after the mixer.
    - `has_logs`: as of `GatedDelta`.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    convolution: int
    norm: GatedNorm | None
    conv_bias: bool = True
    has_bias: bool = False
    out_bias: bool = False
    scales: tuple[float, ...] | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0
    has_logs: bool = True

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelLoadError(
                f"{self.heads} heads of a Mamba-2 layer are not a multiple of {self.groups} groups"
            )

    @property
    def width(self) -> int:
        """The elements of all heads."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> Convolution:
        """The convolution of x, B and C."""
        channels = self.width + 2 * self.groups * self.state_size
        return Convolution(channels=channels, size=self.convolution, has_bias=self.conv_bias)

    @property
    def state(self) -> StateSpec:
        """`state_size` numbers for each element of a head."""
        shape = (self.heads, self.state_size, self.head_dim)
        return StateSpec(self.conv.state, StateArray(shape, "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Mamba (arXiv 2312.00752) as in Jamba: a state space whose decay differs by element.

    `width` elements, each with `state_size` numbers of state; time steps come from `rank` numbers.
    Time steps, B and C have norms with `eps`. `has_logs` as of `GatedDelta`.
    """

    width: int
    state_size: int
    rank: int
    convolution: int
    eps: float
    conv_bias: bool = True
    has_bias: bool = False
    has_logs: bool = True

    @property
    def conv(self) -> Convolution:
        """The convolution of x."""
        return Convolution(channels=self.width, size=self.convolution, has_bias=self.conv_bias)

    @property
    def state(self) -> StateSpec:
        """`state_size` numbers for each element."""
        shape = (self.state_size, self.width)
        return StateSpec(self.conv.state, StateArray(shape, "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """LFM2's gated convolution (arXiv 2511.23404): `out(C * conv(B * x))` over `width` channels."""

    width: int
    convolution: int
    has_bias: bool = False

    @property
    def conv(self) -> Convolution:
        """The convolution of `B * x`."""
        return Convolution(
            channels=self.width, size=self.convolution, activation=None, has_bias=self.has_bias
        )

    @property
    def state(self) -> StateSpec:
        """That of the convolution."""
        return StateSpec(self.conv.state)


RecurrentMixer: TypeAlias = GatedDelta | DeltaAttention | Mamba2 | Mamba | ShortConv
"""A mixer that keeps a state."""
