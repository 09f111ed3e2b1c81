"""A second, smaller model as a greedy drafter (`speculation="draft"`), over a separate KV cache.

Each sample has a sequence there, of its accepted tokens. Drafts are decoded on a fork of it, which
is released afterwards: so a wrong draft leaves no state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pyengine.attention.choice import Choice, select_backend
from pyengine.attention.needs import needs_of
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.executor.executor import Executor
from pyengine.executor.kv_cache_config import KVCacheConfig, cache_specs, configure_cache
from pyengine.executor.model_runner import Runner
from pyengine.kv_cache import BlockManager, Computing, Loading, NoBudget, NoRoom, StepPlan
from pyengine.kv_cache import Sequence as CachedSequence
from pyengine.kv_cache.pool import bytes_per_block, resolve_kv_cache_dtype
from pyengine.kv_cache.pool_size import PoolSettings
from pyengine.models.adapters import AdapterLimits
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.loaded import LoadedModel
from pyengine.models.loader import load_model
from pyengine.models.source import resolve_source
from pyengine.request.request import SequenceState
from pyengine.sampling.operations import largest
from pyengine.speculation.drafters import Draft
from pyengine.utils.dtypes import DType


def kernel_settings(
    settings: EngineSettings,
    *,
    with_mtp_layers: bool = False,
    adapters: AdapterLimits | None = None,
) -> KernelSettings:
    """The settings of an engine that a model's arithmetic depends on."""
    return KernelSettings(
        quantization=settings.quantization,
        linear_backend=settings.linear_backend,
        is_compiled=bool(settings.compile),
        with_mtp_layers=with_mtp_layers,
        adapters=adapters,
    )


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model and the settings of its KV cache, a single layer group."""

    loaded: LoadedModel
    choice: Choice
    kv_dtype: DType
    longest: int
    """Tokens of the longest text that both models accept."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in its KV cache."""
        return bytes_per_block(cache_specs(self.loaded, self.kv_dtype), 1)

    def configure_cache(self, settings: EngineSettings, main: KVCacheConfig) -> KVCacheConfig:
        """A cache for as many tokens as `main`, the main model's, null blocks included."""
        size = self.choice.block_size
        num_blocks = (main.size.num_blocks + 1) * main.block_size // size - 1
        pool = PoolSettings(
            block_size=size,
            num_blocks=max(1, num_blocks),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=self.longest,
        )
        limit = settings.max_num_batched_tokens
        return configure_cache(self.loaded, pool, limit, layer_groups=False, kv_dtype=self.kv_dtype)

    def describe(self, cache: KVCacheConfig) -> dict[str, object]:
        """Rows of `describe()`."""
        return {
            "draft_attention_backend": self.choice.backend,
            "draft_kv_cache_bytes": cache.size.num_bytes,
        }


def load_draft(
    settings: EngineSettings, main: LoadedModel, num_threads: int | None = None
) -> LoadedDraft | None:
    """Load the draft model with the settings of the main one; None without a draft model.

    It has the main model's device and dtype, and honours `quantization`, `attention_backend`,
    `kv_cache_dtype` and `block_size`. Raises `ConfigurationError` if it does not support one.
    """
    if settings.draft_model is None:
        return None
    is_same = settings.draft_model == settings.model
    revision = settings.draft_revision or (settings.revision if is_same else None)
    source = resolve_source(
        settings.draft_model,
        revision=revision,
        token=settings.token,
        load_format=settings.load_format,
    )
    with _about_the_draft():
        draft = load_model(
            source,
            device=str(main.device),
            dtype=main.dtype,
            kernels=kernel_settings(settings),
            num_threads=num_threads,
        )
    check_vocabularies(main, draft)
    if draft.states:
        raise ConfigurationError(
            f"draft_model: {draft.name} has layers that keep a state, which rejected drafts would "
            "have changed; name a model without such layers"
        )
    with _about_the_draft():
        kv_dtype = resolve_kv_cache_dtype(settings.kv_cache_dtype, draft.dtype)
        needs = needs_of(
            draft.layers,
            draft.device,
            draft.dtype,
            kv_dtype=kv_dtype,
            block_size=settings.requested_block_size,
        )
        choice = select_backend(settings.attention_backend, needs)
    longest = min(draft.max_model_len, main.max_model_len)
    return LoadedDraft(draft, choice, needs.cache_dtype, longest)


@contextmanager
def _about_the_draft() -> Iterator[None]:
    """Prefix `ConfigurationError`s inside with the setting `draft_model`."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"draft_model: {error}") from error


def check_vocabularies(model: LoadedModel, draft: LoadedModel) -> None:
    """Raise `ConfigurationError` unless both models mean the same by each token id."""
    ways_out = "a drafter has the tokenizer of the model that it drafts for"
    if model.vocab_size != draft.vocab_size:
        raise ConfigurationError(
            f"draft_model: {draft.name} knows {draft.vocab_size} token ids and {model.name} "
            f"{model.vocab_size}: {ways_out}"
        )
    if model.tokenizer is None or draft.tokenizer is None:
        return
    ours, theirs = model.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if other is not None:
        raise ConfigurationError(
            f"draft_model: {other!r} is token {ours[other]} of {model.name} and "
            f"{theirs.get(other, 'none')} of {draft.name}: {ways_out}"
        )


class DraftModel:
    """Drafts by a second model over its own KV cache.

    A text is computed in chunks: one in each step of the engine, within the token budget that the
    step leaves. Texts get drafts once they are fully computed. So a long prompt delays a stream no
    more than a prompt of the engine does.
    """

    def __init__(
        self, executor: Executor, runner: Runner, manager: BlockManager, *, most: int, longest: int
    ) -> None:
        """`runner` runs after the steps of the engine's `executor`. Its steps compute at most
        `most` tokens; texts of more than `longest` tokens get no drafts."""
        self._executor = executor
        self._runner = runner
        self._manager = manager
        self._most = self._budget = most
        self._longest = longest
        self._sequences: dict[SequenceState, CachedSequence] = {}

    def begin_step(self, budget: int) -> None:
        """Until the next call, compute at most `budget` tokens of texts, drafts excluded."""
        self._budget = min(budget, self._most)

    def propose(self, contexts: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        max_drafts = dict(zip(contexts, limits, strict=True))
        drafts = self._executor.run(lambda: self._drafts(max_drafts))
        return [Draft(drafts.get(context, ())) for context in contexts]

    def forget(self, context: SequenceState) -> None:
        """See `Drafter.forget`."""
        sequence = self._sequences.pop(context, None)
        if sequence is not None:
            sequence.free()

    def _drafts(self, max_drafts: Mapping[SequenceState, int]) -> dict[SequenceState, list[int]]:
        known = self._sequences
        counts = {
            context: min(max_drafts[context], self._longest - known[context].num_tokens)
            for context in self._computed(max_drafts)
        }
        drafts: dict[SequenceState, list[int]] = {context: [] for context in counts}
        forks = {context: known[context].fork(known[context].num_tokens) for context in drafts}
        try:
            for number in range(max(counts.values(), default=0)):
                alive = [context for context, count in counts.items() if count > number]
                for context, token in self._decoded(alive, forks).items():
                    drafts[context].append(token)
        finally:
            for fork in forks.values():
                fork.free()
        return drafts

    def _computed(self, max_drafts: Mapping[SequenceState, int]) -> list[SequenceState]:
        """Spend the budget; return the contexts whose text is computed except its last token.

        A text that does not fit has no sequence afterwards.
        """
        missing: dict[SequenceState, int] = {}
        for context in max_drafts:
            num_tokens = _num_tokens(context)
            if 1 < num_tokens <= self._longest:
                missing[context] = num_tokens - 1 - self._extended(context).num_computed_tokens
        incomplete = [  # those with the fewest missing tokens first
            context
            for context in sorted(missing, key=lambda context: missing[context])
            if self._sequences[context].num_tokens < _num_tokens(context)
        ]
        if incomplete and self._budget:
            self._compute_some(incomplete, max_drafts)
        ready = [context for context in missing if context in self._sequences]
        return [
            context
            for context in ready
            if self._sequences[context].num_tokens == _num_tokens(context)
        ]

    def _extended(self, context: SequenceState) -> CachedSequence:
        """The sequence of a text, with all of its tokens but the last; only new ones are copied."""
        prompt, output = context.request.prompt_token_ids, context.token_ids
        sequence = self._sequences.get(context)
        if sequence is None:
            begin = prompt if output else prompt[:-1]
            sequence = self._manager.sequence(begin, namespace=context.request.namespace)
            self._sequences[context] = sequence
        if new := output[sequence.num_tokens - len(prompt) : -1]:
            sequence.append(new)
        return sequence

    def _compute_some(
        self, incomplete: Sequence[SequenceState], max_drafts: Mapping[SequenceState, int]
    ) -> None:
        """Compute one step of these texts, in order.

        Each commits its known last token instead of a sampled one.
        """
        with self._step(self._budget) as plan:
            last_tokens = []
            for context in incomplete:
                sequence = self._sequences[context]
                answer = plan.prefill(sequence, self._budget)
                if isinstance(answer, NoRoom) and self._forget_others(max_drafts):
                    answer = plan.prefill(sequence, self._budget)
                if isinstance(answer, NoBudget):
                    break
                if isinstance(answer, NoRoom | Loading | Computing):
                    self.forget(context)
                elif answer.samples:
                    last_tokens.append(_last_token(context))
            if plan.num_tokens:
                self._runner.prepare(plan)(None)
            plan.commit(last_tokens)

    def _forget_others(self, max_drafts: Mapping[SequenceState, int]) -> bool:
        """Release the blocks of texts that are not in `max_drafts`; True if there were any."""
        others = [sequence for sequence in self._sequences if sequence not in max_drafts]
        for context in others:
            self.forget(context)
        return bool(others)

    def _decoded(
        self, contexts: list[SequenceState], forks: Mapping[SequenceState, CachedSequence]
    ) -> dict[SequenceState, int]:
        """The most probable next token of each that fits."""
        with self._step(self._most) as plan:
            rejected = set(plan.decode([forks[context] for context in contexts]))
            fitting = [
                each_context for at, each_context in enumerate(contexts) if at not in rejected
            ]
            tokens: list[int] = []
            if fitting:
                tokens = largest(self._runner.prepare(plan)(None).sampling).tolist()
            plan.commit(tokens)
        return dict(zip(fitting, tokens, strict=True))

    @contextmanager
    def _step(self, budget: int) -> Iterator[StepPlan]:
        """A step that is rolled back if it fails."""
        plan = self._manager.begin_step(budget)
        try:
            yield plan
        finally:
            if plan.is_open:
                plan.rollback()


def _num_tokens(context: SequenceState) -> int:
    return len(context.request.prompt_token_ids) + len(context.token_ids)


def _last_token(context: SequenceState) -> int:
    return int((context.token_ids or context.request.prompt_token_ids)[-1])
