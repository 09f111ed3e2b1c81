"""Requests without a model: what the scheduler and drafters need of them."""

from collections.abc import Sequence
from typing import Any

from pyengine.engine.prompts import Prompt
from pyengine.engine.request import Request, SequenceState
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
    tenant: bytes = b"",
    **settings: Any,
) -> Request:
    """A request and its sequences. It ends at `max_tokens` tokens; `settings` are `Request`'s."""
    prompt = Prompt(token_ids=prompt_token_ids, namespace=namespace)
    params = SamplingParams(n=n, temperature=float(n > 1))
    most = max_tokens - len(prompt_token_ids)
    request = Request(request_id, prompt, params, max_output=most, **settings)
    request.read_cache, request.tenant = read_cache, tenant
    for index in range(n):
        sampling = SamplingState(params, prompt_token_ids, seed=0, vocab_size=VOCAB_SIZE)
        request.sequences.append(SequenceState(request, index, sampling))
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
