"""Requests without a model: what the scheduler and drafters need of them."""

from collections.abc import Sequence
from typing import Any

from pyengine.request.output import OutputRules
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request, RequestOptions, SequenceState
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.batch import Entry, ScheduledStep

VOCAB_SIZE = 1 << 17


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    n: int = 1,
    namespace: bytes = b"",
    read_cache: bool = True,
    max_tokens: int = 1 << 30,
    **options: Any,
) -> Request:
    """A request and its sequences. It ends at `max_tokens` tokens; see `RequestOptions`."""
    prompt = Prompt(token_ids=prompt_token_ids, namespace=namespace)
    params = SamplingParams(n=n, temperature=float(n > 1))
    rules = OutputRules(params, prompt_token_ids, max_tokens - len(prompt_token_ids))
    request = Request(request_id, prompt, rules, RequestOptions(**options))
    request.read_cache = read_cache
    for _ in range(n):
        request.add_sequence(SamplingState(params, prompt_token_ids, seed=0, vocab_size=VOCAB_SIZE))
    return request


def make_sequence(
    request_id: str, prompt_token_ids: Sequence[int], **settings: Any
) -> SequenceState:
    """The first sequence of a request. See `make_request`."""
    return make_request(request_id, prompt_token_ids, **settings).sequences[0]


def entries_of(step: ScheduledStep) -> list[Entry]:
    """All parts of the newest step in plan order, its decodes too."""
    decodes = [
        Entry(sequence, sequence.num_computed - 1, 1, 0, samples=True) for sequence in step.decodes
    ]
    return decodes + step.chunks
