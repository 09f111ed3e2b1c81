"""The generation tasks of the end-to-end benchmark."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from benches.engine.serve import GenerateRequest

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY = 49_000


@dataclass(frozen=True)
class Work:
    """`count` prompts of `shared` tokens that are the same and `own` that are not."""

    count: int
    shared: int
    own: int
    max_tokens: int
    kind: Literal["", "text", "sampled"] = ""

    @property
    def is_slow(self) -> bool:
        """Whether an engine that shares nothing takes most of a minute."""
        return self.shared > 0

    @property
    def name(self) -> str:
        """As the tables say it."""
        parts = [f"{self.shared} shared" if self.own else f"{self.shared} identical"]
        length = " + ".join(parts * bool(self.shared) + [f"{self.own} own"] * bool(self.own))
        length = length if self.shared else str(self.own)
        kind = f", {self.kind}" * bool(self.kind)
        return f"{self.count} x ({length} in, {self.max_tokens} out){kind}"

    @property
    def tokens(self) -> int:
        """The tokens that the rate counts: output, or input where the output is one token."""
        per_prompt = self.max_tokens if self.max_tokens > 1 else self.shared + self.own
        return self.count * per_prompt

    def request(self, random: Random, vocab_size: int = VOCABULARY) -> GenerateRequest:
        """New prompts; texts have about four tokens for three words."""
        if self.kind == "text":
            words = passages()
            starts = random.sample(range(len(words) - self.own), self.count)
            texts = [" ".join(words[at : at + 3 * self.own // 4]) for at in starts]
            return GenerateRequest(texts, self.max_tokens)
        shared = random.choices(range(vocab_size), k=self.shared)
        own = [random.choices(range(vocab_size), k=self.own) for _ in range(self.count)]
        request = GenerateRequest([shared + tokens for tokens in own], self.max_tokens)
        return replace(request, temperature=1.0, top_p=0.9) if self.kind == "sampled" else request


def passages() -> list[str]:
    """The words of this repository's pages."""
    pages = sorted((DOCS / "explanation").glob("*.md"))
    return " ".join(page.read_text(encoding="utf-8") for page in pages).split()


WORKS = (
    Work(1, 0, 32, 64),
    Work(32, 0, 32, 64),
    Work(32, 0, 32, 64, "text"),
    Work(32, 0, 32, 16, "sampled"),
    Work(8, 0, 512, 1),
    Work(32, 512, 16, 32),
    Work(32, 512, 0, 32),
    Work(32, 2048, 16, 64),
)
