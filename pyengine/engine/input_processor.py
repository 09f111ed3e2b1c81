"""Makes requests from prompts and settings, or refuses them."""

import math
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import replace
from random import Random
from secrets import token_hex
from threading import Lock, local
from typing import Any

import numpy as np

from pyengine.engine.adapters import with_adapter
from pyengine.engine.model_limits import ModelLimits
from pyengine.errors import ContextLengthError, InvalidRequestError
from pyengine.request.output import OutputRules
from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.prompt_logprobs import PromptLogprobs
from pyengine.request.prompt_states import AllStates, LastState, MeanState, PromptStates
from pyengine.request.prompts import Prompt
from pyengine.request.request import PromptResults, Request, RequestOptions
from pyengine.request.thinking import thinking_markers
from pyengine.request.untrusted_calls import tokenizer_errors
from pyengine.sampling.grammar import Grammars
from pyengine.sampling.logits_processors import LogitsProcessors
from pyengine.sampling.state import SamplingState, sample_seed, tokens_of_words
from pyengine.sampling.thinking_budget import ThinkingBudget
from pyengine.sampling_params import SamplingParams
from pyengine.utils.validation import is_real

_PROMPT_LOGITS = 1 << 26  # the most logits of prompts' positions in a step: 256 MiB in float32

_NO_OPTIONS = RequestOptions()

_MAX_TENANTS = 1024  # tenants whose next seeds are kept, the most recently active


class InputProcessor:
    """Checks and makes requests. Thread-safe."""

    def __init__(
        self,
        limits: ModelLimits,
        prompt_logprobs: PromptEntryCache,
        *,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        """Requests without a seed get one from `seed`, in the order of their making."""
        self.limits = limits
        self._prompt_logprobs = prompt_logprobs
        self._sums = PromptEntryCache(prompt_logprobs.num_blocks, prompt_logprobs.block_size)
        """Sums of the hidden states of prompts, for mean pooling."""
        self._tokenizer = tokenizer
        self._seed = seed
        self._seeds: OrderedDict[bytes, Random] = OrderedDict()
        """Of each tenant: from its seeds it could else count the requests of others."""
        self._encoding, self._seeding = Lock(), Lock()
        self._words = local()
        """The last bad words of each thread, as given and as tokens."""
        self.grammars = Grammars(tokenizer, limits.vocab_size, limits.eos_token_ids)

    def _check(self, prompt: Prompt, params: SamplingParams) -> int:
        """The most tokens of output; `InvalidRequestError` if the request can never be served.

        A request that passes is refused or deferred in three more places, in this order:
        `AsyncEngine._refuse_too_many` while too many of its caller wait, `Scheduler._admit` until
        `max_num_seqs` and blocks allow it, and within that the block manager's `plan_after_match`
        (`rust/kv-core/src/step/admit.rs`), which counts only what is not cached.
        """
        limits, ids = self.limits, np.asarray(prompt.token_ids)
        if not limits.generates and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise InvalidRequestError(
                "this model has no head that chooses tokens: it embeds, scores or classifies texts"
            )
        if not len(ids):
            raise InvalidRequestError("the prompt is empty: it needs at least one token")
        longest = limits.max_model_len - (params.max_tokens != 0)
        if len(ids) > longest:
            condition = "with one token of output " if params.max_tokens != 0 else ""
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; {condition}at most {longest} fit "
                f"({limits.limited_by}); the maximum context length is {limits.max_model_len} "
                "tokens: shorten the prompt"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
            position = int(((ids < 0) | (ids >= limits.vocab_size)).argmax())
            raise InvalidRequestError(
                f"token id {ids[position]} at position {position} of the prompt is outside the "
                f"vocabulary of {limits.vocab_size} tokens"
            )
        if params.n > limits.max_num_seqs:
            raise InvalidRequestError(
                f"n={params.n} completions of one prompt run at once, and max_num_seqs="
                f"{limits.max_num_seqs}: ask for fewer, or raise max_num_seqs"
            )
        params.check_vocabulary(limits.vocab_size)
        left = limits.max_model_len - len(ids)
        max_output = left if params.max_tokens is None else min(params.max_tokens, left)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            params.check_sizes(len(ids), max_output, limits.vocab_size)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                f"stop={list(params.stop)} needs a tokenizer, this model has none: "
                "use stop_token_ids"
            )
        return max_output

    def _new_seed(self, tenant: bytes) -> int:
        """The next seed of a tenant."""
        with self._seeding:
            random = self._seeds.get(tenant)
            if random is None:
                own = Random(f"{self._seed} {tenant!r}") if tenant else Random(self._seed)
                random = self._seeds[tenant] = own
            self._seeds.move_to_end(tenant)
            if len(self._seeds) > _MAX_TENANTS:
                self._seeds.popitem(last=False)
            return random.getrandbits(63)

    def _tokens_of(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Words as tokens. Once for all prompts of a call, which have the same object."""
        if getattr(self._words, "given", None) is not words:
            with self._encoding, tokenizer_errors():  # tokenizers are not re-entrant
                self._words.tokens = tokens_of_words(words, self._tokenizer)
            self._words.given = words
        tokens: list[tuple[int, ...]] = self._words.tokens
        return tokens

    def forget_results(self) -> None:
        """Forget what is known of prompts: other weights compute them from now on."""
        self._prompt_logprobs.clear()
        self._sums.clear()

    def _states_of(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> PromptStates | None:
        """The receiver of the prompt's hidden states; None if none are wanted."""
        if options.pooling == "last":
            return LastState(len(prompt.token_ids))
        if options.pooling == "mean":
            return MeanState(self._sums, prompt)
        if params.return_hidden_states == "all":
            return AllStates(len(prompt.token_ids))
        return None

    def request(
        self,
        request_id: Any,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = _NO_OPTIONS,
    ) -> Request:
        """Make a checked request, not queued yet. Thread-safe.

        `request_id` is text; None: a random one. It waits until the grammar of
        `structured_outputs` is compiled, so call it outside of event loops. Raises
        `InvalidRequestError` if the request cannot be served.
        """
        if request_id is None:
            request_id = token_hex(16)
        elif not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id={request_id!r}: it must be text, or None")
        priority = options.priority
        if type(priority) is not int and (not is_real(priority) or math.isnan(priority)):
            raise InvalidRequestError(
                f"priority={priority!r} is no number: smaller ones are served first, 0 is usual"
            )
        limits = self.limits
        if params.truncate_prompt_tokens is not None:
            kept = params.truncated(prompt.token_ids, limits.max_model_len - 1)
            prompt = replace(prompt, token_ids=kept)
        if options.adapter is not None:
            prompt = with_adapter(prompt, options.adapter)
        max_output = self._check(prompt, params)
        eos_ids = frozenset() if params.ignore_eos else limits.eos_token_ids
        rules = OutputRules(params, prompt.token_ids, max_output, eos_ids, self._tokenizer)
        scores, max_chunk = None, math.inf
        if params.prompt_logprobs is not None:
            top = params.num_prompt_logprobs(limits.vocab_size) or 0
            max_chunk = max(1, _PROMPT_LOGITS // limits.vocab_size)
            reads = params.return_hidden_states != "all"
            scores = PromptLogprobs(self._prompt_logprobs, prompt, top, reads=reads)
        results = PromptResults(scores, self._states_of(prompt, params, options), max_chunk)
        request = Request(request_id, prompt, rules, options, results)
        seed = self._new_seed(options.tenant) if params.seed is None else params.seed
        sampling = SamplingState(
            params,
            prompt.token_ids,
            seed=seed,
            vocab_size=limits.vocab_size,
            stop_ids=limits.eos_token_ids,
            bad_words=self._tokens_of(params.bad_words) if params.bad_words else (),
        )
        if params.structured_outputs is not None:
            sampling.keep_to(self.grammars.matcher(params.structured_outputs, options.tenant))
        if params.logits_processors and max_output:
            processors = LogitsProcessors(params.logits_processors, prompt.token_ids)
            sampling.process_with(processors)
        if params.limits_thinking:
            with self._encoding:
                markers = thinking_markers(self._tokenizer)
            budget = params.thinking_token_budget or 0
            sampling.limit_thinking(ThinkingBudget(budget, markers, prompt.token_ids))
        request.add_sequence(sampling)
        for index in range(1, params.n):
            request.add_sequence(sampling.sibling(sample_seed(seed, index)))
        return request


def refuse_submitted(requests: Sequence[Request]) -> None:
    """Raise `InvalidRequestError` for a request that an engine has accepted before."""
    for request in requests:
        if request.is_submitted:
            raise InvalidRequestError(
                f"request {request.request_id!r} was submitted before: make a new one for each call"
            )


def refuse_taken(requests: Sequence[Request], live: Container[str]) -> None:
    """Raise `InvalidRequestError` for an id among `live` ones, or twice among these."""
    names = set[str]()
    for request in requests:
        if request.request_id in live or request.request_id in names:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use: give another one, or none"
            )
        names.add(request.request_id)
