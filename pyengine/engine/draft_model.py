"""A second, smaller model as a drafter: greedily, over a KV cache of its own.

Each sample has a sequence there, of the tokens that stand. Drafts are decoded on a fork of it that
is given up when they have been: so a wrong draft leaves nothing behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyengine.cache import BlockManager, NoBudget, NoRoom, StepPlan
from pyengine.cache import Sequence as CachedSequence
from pyengine.core.errors import ConfigurationError
from pyengine.engine.executor import Executor
from pyengine.models import LoadedModel
from pyengine.runner import Runner
from pyengine.speculation import Context, Draft


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
    """Drafts by a model that runs over blocks of its own."""

    def __init__(
        self, executor: Executor, runner: Runner, manager: BlockManager, *, most: int, longest: int
    ) -> None:
        """`executor` is that of the engine, behind whose steps `runner` runs. Steps of it compute
        at most `most` tokens; texts beyond `longest` tokens get no drafts."""
        self._executor = executor
        self._runner = runner
        self._manager = manager
        self._most = most
        self._longest = longest
        self._sequences: dict[Context, CachedSequence] = {}

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        """See `Drafter.propose`."""
        asked = dict(zip(contexts, most, strict=True))
        found = self._executor.run(lambda: self._drafts(asked))
        return [Draft(found.get(context, ())) for context in contexts]

    def forget(self, context: Context) -> None:
        """See `Drafter.forget`."""
        sequence = self._sequences.pop(context, None)
        if sequence is not None:
            sequence.free()

    def _drafts(self, asked: Mapping[Context, int]) -> dict[Context, list[int]]:
        self._catch_up(asked)
        known = self._sequences
        counts = {
            context: min(count, self._longest - known[context].num_tokens)
            for context, count in asked.items()
            if context in known
        }
        drafts: dict[Context, list[int]] = {context: [] for context in counts}
        forks = {one: known[one].fork(known[one].num_tokens) for one in drafts}
        try:
            for number in range(max(counts.values(), default=0)):
                alive = [one for one, count in counts.items() if count > number]
                for context, token in self._decoded(alive, forks).items():
                    drafts[context].append(token)
        finally:
            for fork in forks.values():
                fork.free()
        return drafts

    def _catch_up(self, asked: Mapping[Context, int]) -> None:
        """Compute what stands of each text, but for its last token.

        A text for which there is no room has no sequence afterwards.
        """
        behind: dict[Context, int] = {}
        for context in asked:
            prompt = [int(token) for token in context.request.prompt_token_ids]
            tokens = [*prompt, *context.token_ids]
            sequence = self._sequences.get(context)
            if len(tokens) > self._longest:
                continue
            if sequence is None:
                namespace = context.request.namespace
                sequence = self._manager.sequence(tokens[:-1], namespace=namespace)
                self._sequences[context] = sequence
            elif sequence.num_tokens < len(tokens):
                if new := tokens[sequence.num_tokens : -1]:
                    sequence.append(new)
            else:
                continue
            behind[context] = tokens[-1]
        while behind:
            self._compute_some(behind, asked)

    def _compute_some(self, behind: dict[Context, int], asked: Mapping[Context, int]) -> None:
        """Compute a step of these texts; those that are done are taken out.

        The last token of each, which is given, stands where others would sample one.
        """
        with self._step() as plan:
            done = []
            for context in list(behind):
                sequence = self._sequences[context]
                answer = plan.prefill(sequence, self._most)
                if isinstance(answer, NoBudget):
                    break
                if isinstance(answer, NoRoom):
                    if not self._give_up_others(asked):
                        del behind[context]
                        self.forget(context)
                elif answer.samples:
                    done.append(context)
            if plan.num_tokens:
                self._runner.prepare(plan)(None)
            plan.commit([behind.pop(context) for context in done])

    def _give_up_others(self, asked: Mapping[Context, int]) -> bool:
        """Give back the blocks of texts that nobody asks about now; whether there were any."""
        others = [one for one in self._sequences if one not in asked]
        for context in others:
            self.forget(context)
        return bool(others)

    def _decoded(
        self, contexts: list[Context], forks: Mapping[Context, CachedSequence]
    ) -> dict[Context, int]:
        """The most probable next token of each; none where there is no room."""
        with self._step() as plan:
            misfits = set(plan.decode([forks[context] for context in contexts]))
            fitting = [one for at, one in enumerate(contexts) if at not in misfits]
            tokens: list[int] = []
            if fitting:
                tokens = self._runner.prepare(plan)(None).sampling.argmax(-1).tolist()
            plan.commit(tokens)
        return dict(zip(fitting, tokens, strict=True))

    @contextmanager
    def _step(self) -> Iterator[StepPlan]:
        """A step that is rolled back if it fails."""
        plan = self._manager.begin_step(self._most)
        try:
            yield plan
        finally:
            if plan.is_open:
                plan.rollback()
