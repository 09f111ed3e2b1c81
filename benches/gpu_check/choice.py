"""What the engine chooses on this machine by itself, and why."""

from collections.abc import Iterator
from functools import partial

from benches.gpu_check.answers import family_folder
from benches.gpu_check.names import families
from benches.gpu_check.rows import Part, Row, Setup
from pyengine import LLM

_TYPICAL = ("llama", "gemma3_text", "gpt_oss")


def parts(setup: Setup) -> list[Part]:
    """See `Part`."""
    return [
        (family, partial(_choice, setup, family))
        for family in _TYPICAL
        if family in families(setup)
    ]


def _choice(setup: Setup, family: str) -> Iterator[Row]:
    llm = LLM(family_folder(setup, family), device=setup.device, max_num_seqs=4)
    told = llm.describe()
    wanted = (
        *("attention_backend", "attention_reason", "attention_backends", "block_size"),
        *("dtype", "async_scheduling", "cuda_graphs", "layer_groups"),
    )
    yield Row(f"choice for {family}", "info", {key: told[key] for key in wanted if key in told})
