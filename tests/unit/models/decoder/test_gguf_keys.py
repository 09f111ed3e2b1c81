"""Each key of a GGUF header means what the same setting means in a folder, or is refused by name.

Headers are changed in memory, and specs are compared: `test_gguf.py` compares logits.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.gguf_settings import _EXPECTED, gguf_settings
from pyengine.models.decoder.loading import spec_of
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import GGUFArray, GGUFHeader, read_header
from pyengine.models.gguf_keys import _IDLE, HeaderKeys
from pyengine.models.gguf_rope import ROPE_TENSORS
from tests.unit.models.decoder.test_hostile import GARBAGE, bounded
from tests.unit.models.gguf_of_model import CONFIGS, tiny_model, write_gguf_of

ARCHITECTURES = sorted(CONFIGS)
Spec = Any


def as_stored(values: Any) -> Spec:
    """The values of a spec, floats as a header has them: in float32."""
    if isinstance(values, dict):
        return {key: as_stored(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [as_stored(value) for value in values]
    if not isinstance(values, float):
        return values
    with np.errstate(over="ignore"):
        return float(np.float32(values).round(7))


@dataclass(frozen=True)
class Case:
    """The header of a file, and the configuration of the model that it was made of."""

    header: GGUFHeader
    config: dict[str, Any]

    @property
    def prefix(self) -> str:
        return str(self.header.architecture)

    def spec(self, **values: Any) -> Spec:
        """The spec of the file with these values; keys lack the name of the architecture."""
        changed = {f"{self.prefix}{key}": value for key, value in values.items()}
        return self.spec_with(changed)

    def spec_with(self, values: dict[str, Any]) -> Spec:
        merged = {**self.header.values, **values}
        left = {key: value for key, value in merged.items() if value is not None}
        keys = HeaderKeys(Path("model.gguf"), replace(self.header, values=left))
        settings = gguf_settings(keys)
        for key in left:
            if key.startswith("tokenizer."):
                keys.raw(key)
        keys.refuse_unread()
        return as_stored(asdict(replace(spec_of(settings, "model.gguf"), saved_dtype=None)))

    def folder_spec(self, **changes: Any) -> Spec:
        """That of the folder, with other settings; `rope` are those of its rotary embedding."""
        values = json.loads(json.dumps(self.config))
        rope = changes.pop("rope", {})
        section = values.get("rope_parameters")
        if rope and section is not None:
            (section.get("full_attention") or section).update(rope)
            if values["model_type"] == "olmo3" and "rope_theta" in rope:  # one base for all layers
                section["sliding_attention"]["rope_theta"] = rope["rope_theta"]
        spec = spec_of({**values, **changes}, "config.json")
        return as_stored(asdict(replace(spec, saved_dtype=None)))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    known: dict[str, Case] = {}

    def of(architecture: str) -> Case:
        if architecture not in known:
            path = tmp_path_factory.mktemp(architecture) / "model.gguf"
            changes = {"num_hidden_layers": 6} if architecture == "gemma3" else {}
            model = tiny_model(architecture, **changes)
            write_gguf_of(model, path, architecture)
            config = json.loads(model.config.to_json_string(use_diff=False))
            known[architecture] = Case(read_header(path), config)
        return known[architecture]

    return of


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_header_says_what_the_folder_says(
    architecture: str, case_of: Callable[[str], Case]
) -> None:
    file = case_of(architecture)
    assert file.spec() == file.folder_spec()


_SCALINGS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({".rope.freq_base": 500.0}, {"rope_theta": 500.0}),
    (
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    ({".rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, {}),
    (
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 16,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    (
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 16,
            ".rope.scaling.yarn_beta_fast": 20.0,
            ".rope.scaling.yarn_beta_slow": 2.0,
            ".rope.scaling.yarn_ext_factor": 1.0,
            ".rope.scaling.attn_factor": 1.5,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5 * 1.1386294361119891,
        },
    ),
)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "gpt2"])
def test_scaling_of_positions_is_that_of_the_folder(
    architecture: str, case_of: Callable[[str], Case]
) -> None:
    file = case_of(architecture)
    for values, rope in _SCALINGS:
        if architecture == "phi3" and rope.get("rope_type") == "yarn":
            with pytest.raises(ModelLoadError, match=r"model\.gguf.*short_factor"):
                file.spec(**values)  # the family has LongRoPE for it
            continue
        actual, expected = file.spec(**values), file.folder_spec(rope=rope)
        if architecture == "gpt-oss":  # its converter leaves the key out
            expected = file.folder_spec(rope={**rope, "truncate": False})
        assert actual == expected, values
        assert (actual == file.spec()) == (not rope), values


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "values",
    [
        {".rope.scaling.type": "yarn"},
        {".rope.scaling.type": "longrope"},
        {".rope.scaling.type": "ntk", ".rope.scaling.factor": 2.0},
        {".rope.scaling.attn_factor": 1.5},
        {".rope.scaling.alpha": 1000.0},
        {".rope.scaling.yarn_log_multiplier": 0.1},
        {".rope.scaling.yarn_beta_fast": 20.0},
        {".rope.scaling.type": "yarn", ".rope.scaling.factor": 2.0, ".rope.scaling.alpha": 2.0},
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 2.0,
            ".rope.scaling.yarn_ext_factor": 0.5,
        },
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 2.0,
            ".rope.scaling.yarn_attn_factor": 3.0,
        },
        {".rope.dimension_sections": GGUFArray(4, (2, 2, 0, 0))},
    ],
    ids=lambda values: "+".join(key.rpartition(".")[2] for key in values),
)
def test_scaling_that_no_folder_has_is_refused(
    architecture: str, values: dict[str, Any], case_of: Callable[[str], Case]
) -> None:
    with pytest.raises(ModelLoadError, match=r"rope\.scaling|dimension_sections"):
        case_of(architecture).spec(**values)


_IDLE_ALONE = {
    ".rope.scaling.original_context_length": "of no effect without scaling",
    ".rope.scaling.type": "linear, without a factor, scales nothing",
}
_NEUTRAL = {key: allowed for key, allowed, _ in _EXPECTED} | {".expert_weights_norm": (True,)}
_WITHOUT_DENSE_LAYERS = ("qwen2moe", "qwen3moe")


def keys_of_the_library(prefix: str) -> Iterator[str]:
    """All keys of architectures that the library gguf knows."""
    from gguf.constants import Keys

    for group in (Keys.LLM, Keys.Attention, Keys.Rope):
        for name, key in vars(group).items():
            if isinstance(key, str) and not name.startswith("_") and "{arch}" in key:
                yield key.format(arch=prefix, dense="dense")
    indexers = [kind for _, kind in inspect.getmembers(Keys.Attention, inspect.isclass)]
    for group in (Keys.SSM, *indexers):
        for name, key in vars(group).items():
            if isinstance(key, str) and not name.startswith("_"):
                yield key.format(arch=prefix)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_key_is_passed_over(architecture: str, case_of: Callable[[str], Case]) -> None:
    """A key changes the spec, is refused by name, or is known to have no effect."""
    file = case_of(architecture)
    before, seen = file.spec(), 0
    idle = {key.format(file.prefix) for key in _IDLE}
    known = list(keys_of_the_library(file.prefix))
    assert len(known) > 80
    for key in {*known, *file.header.values, f"{file.prefix}.nobody_knows.this"}:
        if not key.startswith(f"{file.prefix}."):
            continue
        own, silent = file.header.values.get(key), []
        for value in (7, 0.75, True, "linear", GGUFArray(2, (1, 3)), 3.0):
            if value == own and type(value) is type(own):
                continue
            try:
                actual = file.spec_with({key: value})
            except ModelLoadError as error:
                seen += 1
                assert "model.gguf" in str(error), (key, error)
                continue
            if actual == before and value not in _NEUTRAL.get(key.removeprefix(file.prefix), ()):
                silent.append(value)
        accepted = key in idle or key.removeprefix(file.prefix) in _IDLE_ALONE
        if key.endswith(".feed_forward_length"):
            accepted = architecture in _WITHOUT_DENSE_LAYERS
        assert not silent or accepted, (key, silent)
    assert seen > 100


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_key_of_a_header_may_have_any_value(
    architecture: str, case_of: Callable[[str], Case]
) -> None:
    file = case_of(architecture)
    arrays = (GGUFArray(0, ()), GGUFArray(3), GGUFArray(2, (-1, 2)), GGUFArray(1, (float("nan"),)))
    kinds = int, float, str, bool
    values = [value for value in GARBAGE if type(value) in kinds and not _is_beyond_64_bits(value)]
    keys = [key for key in file.header.values if not key.startswith("tokenizer.")]
    more = (".rope.scaling.type", ".rope.scaling.factor", ".attention.scale", ".expert_count")
    with bounded():
        for key in {*keys, *(f"{file.prefix}{suffix}" for suffix in more)}:
            for value in (*values, *arrays):
                try:
                    file.spec_with({key: value})
                except ModelLoadError as error:
                    said = str(error)
                    assert "model.gguf" in said and len(said) < 2000, (key, value, said)


def _is_beyond_64_bits(value: object) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix", "vocab", 5])
def test_files_that_are_no_models_are_named(kind: object, case_of: Callable[[str], Case]) -> None:
    file = case_of("llama")
    assert file.spec_with({"general.type": "model"}) == file.spec()
    with pytest.raises(ModelLoadError, match=r"general\.type"):
        file.spec_with({"general.type": kind})


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "starcoder2", "gpt2", "stablelm"])
@pytest.mark.parametrize("name", ROPE_TENSORS)
def test_divisors_that_an_architecture_does_not_have_are_refused(
    architecture: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf_of(tiny_model(architecture), path, architecture, extra={name: np.ones(4)})
    with pytest.raises(ModelLoadError, match=name), GGUFFile.open(path) as file:
        open_gguf(file)
