"""An engine without a model: it answers with its prompt, one word at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pyengine.sampling_params import SamplingParams


def make_output(prompt_ids: list[int], words: list[str], *, cached: int) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=prompt_ids,
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(0, "".join(words), list(range(len(words))), finish_reason="stop")
        ],
        finished=True,
        num_cached_tokens=cached,
        metrics=RequestMetrics(0.0, 1.0, first_token_time=3.0, finished_time=5.0),
    )


@dataclass
class FakeEngine:
    """Records what it was asked; so many words, or results, come before Ctrl-C."""

    chat_template: str | None = "a template"
    longest_prompt: int = 1000
    words: Sequence[str] = ("The", " answer", " is [red]42[/red]", ".")
    interrupt_after: int | None = None
    num_drafts: int = 0
    counters: dict[str, int] = field(
        default_factory=lambda: {
            "allocated_blocks": 40,
            "in_flight_blocks": 1,
            "merged_blocks": 7,
            "draft_tokens": 5,
            "accepted_draft_tokens": 2,
        }
    )
    settings: EngineSettings | None = None
    seen: list[Any] = field(default_factory=list)
    params: SamplingParams | None = None
    several: list[SamplingParams] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    interruption: BaseException = field(default_factory=KeyboardInterrupt)
    closed: int = 0
    computed: list[int] = field(default_factory=list)
    vocabulary: list[str] = field(default_factory=list)
    max_model_len: int = 1 << 20

    @property
    def model_path(self) -> Path:
        return Path("models/fake")

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(chat_template=self.chat_template)

    def open(self, settings: EngineSettings) -> "FakeEngine":
        self.settings = settings
        return self

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if word not in self.vocabulary:
                self.vocabulary.append(word)
            ids.append(self.vocabulary.index(word))
        return ids

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(" ".join(f"<{m['role']}> {m['content']}" for m in messages))

    def _ids(self, prompt: Any) -> list[int]:
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt["prompt_token_ids"])
        if len(ids) > self.longest_prompt:
            raise InvalidRequestError(f"the prompt has {len(ids)} tokens, at most 1000 fit")
        return ids

    def _cached(self, ids: list[int]) -> int:
        equal = 0
        while equal < min(len(ids), len(self.computed)) and ids[equal] == self.computed[equal]:
            equal += 1
        self.computed = ids
        return equal

    def _charge(self) -> None:
        self.counters["allocated_blocks"] += 3
        self.counters["merged_blocks"] += 2

    def generate_iter(
        self, prompts: Any, sampling_params: Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """The last prompt ends first."""
        prompts = list(prompts)
        self.seen += prompts
        self.several = list(sampling_params)
        self.params = self.several[0]
        ready = [self._ids(prompt) for prompt in prompts]
        self._charge()
        try:
            for number, index in enumerate(reversed(range(len(prompts)))):
                if number == self.interrupt_after:
                    raise self.interruption
                ids = ready[index]
                failed = "pool full" if index in self.failing else None
                words = [] if failed else [f"answer to {len(ids)} tokens"]
                output = make_output(ids, words, cached=self._cached(ids))
                yield replace(output, index=index, error=failed)
        finally:
            self.closed += 1

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        self.params = sampling_params
        self.seen.append(prompt)
        ids = self._ids(prompt)
        cached = self._cached(ids)
        self._charge()
        try:
            words: list[str] = []
            for word in self.words:
                if len(words) == self.interrupt_after:
                    raise KeyboardInterrupt
                words.append(word)
                yield make_output(ids, words, cached=cached)
        finally:
            self.closed += 1

    @contextmanager
    def recording(self, path: Path) -> Iterator[None]:
        assert not self.seen
        yield
        path.write_bytes(b"recorded")

    def stats(self) -> Any:
        return SimpleNamespace(counters=dict(self.counters), num_drafts=self.num_drafts)

    def describe(self) -> Mapping[str, object]:
        return {
            "versions": {"torch": "2"},
            "model": "owner/fake",
            "max_model_len": self.max_model_len,
            "device": "cpu",
            "attention": {"backend": "gather", "reason": "the device is a CPU"},
        }
