"""Beam search over single steps of an engine, with vLLM's candidates and scores.

Each step computes one token's log-probabilities for every beam, as a request whose prompt is the
beam: the prefix cache shares the blocks that beams have in common.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any

import numpy as np

from pyengine.errors import EngineClosedError, InvalidRequestError
from pyengine.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from pyengine.request.prompts import Prompt, shown, text_from
from pyengine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class BeamSearch:
    """The beams of one prompt."""

    def __init__(
        self, prompt: Prompt, params: BeamSearchParams, eos_ids: frozenset[int], max_model_len: int
    ) -> None:
        """The beams end at `eos_ids`, unless `params` ignore them."""
        self._prompt, self._params = replace(prompt, text=None), params
        self._eos_ids = frozenset[int]() if params.ignore_eos else eos_ids
        tokens = np.asarray(prompt.token_ids).tolist()
        self._beams = [BeamSearchSequence(tokens, [])]
        self._completed: list[BeamSearchSequence] = []
        self._left = max(1, min(params.max_tokens, max_model_len - len(tokens)))

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of the next step, one for each beam; none once the search has ended."""
        beams = self._beams if self._left else []
        token_ids: list[Any] = [np.array(beam.tokens, dtype=np.int64) for beam in beams]
        return [replace(self._prompt, token_ids=ids) for ids in token_ids]

    def advance(self, steps: Sequence[Mapping[int, Logprob]]) -> None:
        """Extend the beams by the log-probabilities of their next tokens, in the same order."""
        width, candidates = self._params.beam_width, []
        for beam, logprobs in zip(self._beams, steps, strict=True):
            for token, logprob in logprobs.items():
                total = beam.cum_logprob + logprob.logprob
                if token in self._eos_ids:
                    self._completed.append(self._extended(beam, token, total, logprobs))
                else:
                    candidates.append((total, beam, token, logprobs))
        best = nlargest(width, candidates, key=lambda candidate: candidate[0])
        self._beams = [
            self._extended(beam, token, total, logprobs) for total, beam, token, logprobs in best
        ]
        self._completed = self._best(self._completed)
        self._left = self._left - 1 if self._beams else 0

    def _extended(
        self,
        beam: BeamSearchSequence,
        token: int,
        total: float,
        logprobs: Mapping[int, Logprob],
    ) -> BeamSearchSequence:
        is_end = token in self._eos_ids
        is_shown = not is_end or self._params.include_stop_str_in_output
        return BeamSearchSequence(
            tokens=[*beam.tokens, token] if is_shown else beam.tokens,
            logprobs=[*beam.logprobs, dict(logprobs)],
            cum_logprob=total,
            finish_reason="stop" if is_end else None,
            stop_reason=token if is_end else None,
        )

    def _best(self, sequences: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        """The sequences with the best scores, as many as there are beams."""
        return nlargest(self._params.beam_width, sequences, key=self._score)

    def _score(self, sequence: BeamSearchSequence) -> float:
        """vLLM's score: its length is that of prompt and answer, without the end."""
        length = len(sequence.tokens)
        length -= sequence.finish_reason == "stop" and self._params.include_stop_str_in_output
        return float(sequence.cum_logprob / length**self._params.length_penalty)

    def output(self, tokenizer: Any) -> BeamSearchOutput:
        """The best sequences, once the search has ended; their texts if there is a tokenizer."""
        beams = [replace(beam, finish_reason="length") for beam in self._beams]
        best = self._best([*self._completed, *beams])
        if tokenizer is None:
            return BeamSearchOutput(best)
        return BeamSearchOutput(
            [replace(item, text=text_from(item.tokens, tokenizer)) for item in best]
        )


def step_params(params: BeamSearchParams, vocab_size: int) -> SamplingParams:
    """The parameters of each request of a search."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequestError(f"params is {shown(params)}: give BeamSearchParams(...)")
    return SamplingParams(
        temperature=0,
        seed=0,
        max_tokens=1,
        logprobs=min(2 * params.beam_width, vocab_size),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def first_logprobs(output: RequestOutput) -> dict[int, Logprob]:
    """The candidates in the output of such a request. Raises `EngineClosedError` without one."""
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        raise EngineClosedError("the engine has aborted a step of the beam search")
    return logprobs[0]
