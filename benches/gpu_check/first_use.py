"""Every backend once, on the model whose kernels most others share: what compiles, compiles now."""

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from benches.gpu_check.answers import GREEDY, family_folder, prompts, small_llm
from benches.gpu_check.names import CANNOT_SERVE, TRIED_IN_VAIN, backends, formats
from benches.gpu_check.rows import Part, Row, Setup, rounded
from pyengine import LLM
from pyengine.core.errors import ConfigurationError


def parts(setup: Setup) -> list[Part]:
    """See `Part`."""
    return [(name, partial(_use, setup, name)) for name in backends(setup)]


def _use(setup: Setup, backend: str) -> Iterator[Row]:
    """Seconds until the first answer, and of the same again."""
    folder = family_folder(setup, "llama")
    check, start = f"first use of {backend}", perf_counter()
    served = first_served(setup, check, lambda dtype: small_llm(folder, setup, dtype, backend))
    if isinstance(served, Row):
        yield served
        return
    _, llm = served
    seconds = []
    for _ in range(2):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
        seconds.append(rounded(perf_counter() - start))
        start = perf_counter()
    yield Row(check, "pass", {"first_seconds": seconds[0], "again_seconds": seconds[1]})


def first_served(setup: Setup, check: str, build: Callable[[str], LLM]) -> tuple[str, LLM] | Row:
    """The first number format that the backend serves, and its engine; or why it serves none."""
    for dtype in formats(setup):
        try:
            return dtype, build(dtype)
        except ConfigurationError as error:
            row = refusal(check, error)
        if row.status == "fail":
            break
    return row


def refusal(check: str, error: ConfigurationError) -> Row:
    """A backend that says it cannot serve; one that is there and fails is another thing."""
    text = str(error)
    is_refusal = CANNOT_SERVE in text and TRIED_IN_VAIN not in text
    return Row(check, "refused" if is_refusal else "fail", {}, text.partition("; ")[0])
