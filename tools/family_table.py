"""Write the table of families in docs/reference/models.md by the rules of the loader.

Families are the causal language models of the installed transformers. Families without a decoder of
pyengine are built in their default sizes, without weights.
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyengine.errors import PyEngineError
from pyengine.models.config import max_model_len
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.gguf_recurrent import RECURRENT_ARCHITECTURES
from pyengine.models.decoder.gguf_settings import ARCHITECTURES
from pyengine.models.transformers_calls import quiet_transformers, reason_of

DOCUMENT = Path(__file__).parents[1] / "docs/reference/models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->"
OWN, FALLBACK, REFUSED = "own", "fallback", "refused"
_FOLDER = Path("model")
_RELEASED: dict[str, dict[str, Any]] = {
    **{key: {"head_dim": 128} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
"""Settings of released models, where no model is built of the defaults, or another one."""
_ATTENTION = ("Attention", "MLA")
_START = re.compile(r"^the model \(\S+\) has ")
_ENDS = re.compile(r": it is made to .*|\. You can .*")
_NOT_PAGED = "its attention does not go through transformers' `AttentionInterface`"


def families() -> list[str]:
    """The causal language models of transformers and of the table of families."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TABLE})


def status(family: str) -> tuple[str, str]:
    """How the loader runs a family (own, fallback, refused), and why if it is refused."""
    if family in TABLE:
        known = {name: row.family for name, row in ARCHITECTURES.items()}
        known |= {name: row.family for name, row in RECURRENT_ARCHITECTURES.items()}
        files = [name for name, own in known.items() if own == family]
        return OWN, f"GGUF: {', '.join(f'`{name}`' for name in files)}" if files else ""
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            why = _obstacle(family)
        except PyEngineError as error:
            why = str(error)
        except Exception as error:  # transformers raises errors of any type for invalid defaults
            why = f"transformers does not build it: {reason_of(error)[:160]}"
    return (REFUSED, _plain(why)) if why else (FALLBACK, "")


def _obstacle(family: str) -> str:
    """The reason why the fallback does not run a family; empty if it does."""
    from transformers import CONFIG_MAPPING

    from pyengine.models import config as rules
    from pyengine.models.fallback import attending_layers, empty_model, refuse_unpageable

    config: Any = CONFIG_MAPPING[family](**_RELEASED.get(family, {}))
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        return "it has an encoder"
    rules._refuse_unpageable(config, _FOLDER)
    model = empty_model(config)
    refuse_unpageable(model, _FOLDER)
    if not getattr(model, "_supports_attention_backend", False):
        return _NOT_PAGED
    layers = attending_layers(model)
    max_model_len(text, _FOLDER)
    attending = {
        part.layer_idx
        for part in model.modules()
        if hasattr(part, "layer_idx") and type(part).__name__.endswith(_ATTENTION)
    }
    if len(attending) < len(layers):
        return f"{len(layers) - len(attending)} of {len(layers)} layers have no attention"
    return ""


def _plain(why: str) -> str:
    """A reason as a table cell, without the folder and the advice."""
    words = _ENDS.sub("", why.replace(f"in {_FOLDER} ", "")).replace(f" ({_FOLDER})", "")
    words = _START.sub("", words)
    return " ".join(words.split()).replace("|", "\\|")


def family_table() -> Iterator[str]:
    """The table, row by row."""
    import transformers

    rows = [(family, *status(family)) for family in families()]
    counts = {kind: sum(row[1] == kind for row in rows) for kind in (OWN, FALLBACK, REFUSED)}
    yield f"transformers {transformers.__version__} has {len(rows)} families of causal language"
    yield f"models: {counts[OWN]} run in decoders of pyengine, {counts[FALLBACK]} as modules of"
    yield f"transformers, and {counts[REFUSED]} are refused."
    yield ""
    yield "| `model_type` | runs as | |"
    yield "|---|---|---|"
    for family, kind, note in rows:
        yield f"| `{family}` | {kind} | {note} |"


def with_table(text: str) -> str:
    """The page with the table from the code."""
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise SystemExit(f"{DOCUMENT} has no place for the table: {BEGIN.strip()} ... {END}")
    return f"{head}{BEGIN}" + "\n".join(family_table()) + f"\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
