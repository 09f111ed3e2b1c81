"""Many requests at once, in the default configuration and with overlap, against one at a time."""

from random import Random
from typing import Any

from benches.gpu.first_run.context import Context
from pyengine import LLM, SamplingParams
from tests.gpu.answers import answer, oracle, tokens
from tests.gpu.compare import compare
from tests.gpu.models import ORACLE, Place


def _place(context: Context) -> Place:
    return Place(context.device, context.folder)


def _dtype(context: Context) -> str:
    """bfloat16; float32 on a CPU, where it is faster."""
    name: str = context.either("bfloat16", "float32")
    return name


def _described(llm: LLM) -> dict[str, Any]:
    about = llm.describe()
    return {
        "backend": about["attention_backend"],
        "compile": about["compile"],
        "graphs": str(about["cuda_graphs"])[:40],
        "overlap": about["async_scheduling"],
    }


def crowd(context: Context) -> None:
    """Many greedy requests at once, in the default configuration, against one at a time."""
    place, random, count = _place(context), Random(4), context.either(96, 6)
    prompts = [tokens(random.randint(1, 200), random) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=random.randint(2, context.either(60, 8)),
            ignore_eos=True,
            logprobs=20,
            detokenize=False,
        )
        for _ in prompts
    ]
    settings = context.either(
        {"enforce_eager": False, "compile": None, "max_num_seqs": 64}, {"max_num_seqs": 64}
    )
    folder = place.model("llama")
    dtype = _dtype(context)
    fast = place.llm(folder, dtype, "auto", **settings)
    alone = {"async_scheduling": False, "enable_prefix_caching": False, "max_num_seqs": 1}
    slow = place.llm(folder, dtype, ORACLE, **alone)
    got, want = (
        [answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (fast, slow)
    )
    comparison = compare(got, want, oracle(place, "llama", dtype).bounds.same)
    context.record(
        requests=count,
        wrong=comparison.wrong[:3],
        equal=comparison.num_equal,
        near_ties=len(comparison.near_ties),
        **_described(fast),
    )


def random_requests(context: Context) -> None:
    """Requests with all kinds of parameters, in float32: the same tokens with overlap."""
    place, count = _place(context), context.either(200, 20)
    for seed in context.either((1, 2), (1,)):
        random = Random(seed)
        prompts = [tokens(random.randrange(1, 120), random) for _ in range(count)]
        params = [_params(random, number) for number in range(count)]
        chunk, answers = random.choice((64, 256)), []
        for has_overlap in (False, True):
            llm = place.llm(
                place.model("llama"),
                "float32",
                ORACLE,
                async_scheduling=has_overlap,
                max_num_seqs=32,
                max_num_batched_tokens=chunk,
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([tuple(output.outputs[0].token_ids) for output in outputs])
        different = sum(a != b for a, b in zip(*answers, strict=True))
        context.record(seed=seed, requests=count, different=different, ok=different <= count // 50)


def _params(random: Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=random.choice((0, 0, 1)),
        top_p=random.choice((1, 0.9)),
        top_k=random.choice((0, 20)),
        seed=seed,
        max_tokens=random.randrange(1, 40),
        min_tokens=random.choice((0, 1)),
        frequency_penalty=random.choice((0, 0, 0.5)),
        logprobs=random.choice((None, None, 2)),
        ignore_eos=True,
        detokenize=False,
    )
