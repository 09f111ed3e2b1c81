"""The options that several commands share, each declared once."""

from typing import Annotated

import typer

_ENGINE = "Engine"
_SAMPLING = "Sampling"


Model = Annotated[
    str | None,
    typer.Option(
        help="Hub id, local folder or GGUF file; without it the embedded default model.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=_ENGINE)]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
]
AttentionBackend = Annotated[
    str, typer.Option(help="auto, or a backend's name to force it.", rich_help_panel=_ENGINE)
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Let torch compile the model: a minute or two first, then faster.",
        rich_help_panel=_ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(help="auto (the model's), or fp8: 8-bit floats.", rich_help_panel=_ENGINE),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens per KV block; without it, what the attention backend likes best.",
        rich_help_panel=_ENGINE,
    ),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(help="Blocks in the pool; without it, by memory.", rich_help_panel=_ENGINE),
]
KvCacheGib = Annotated[
    float | None, typer.Option(help="Memory for the pool, in GiB.", rich_help_panel=_ENGINE)
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        help="Share of a GPU's free memory for the pool, where no other size is given.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int, typer.Option(help="Sequences in one step at most.", rich_help_panel=_ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Tokens in one step at most.", rich_help_panel=_ENGINE)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Prompt and answer at most; without it, the model's own limit.",
        rich_help_panel=_ENGINE,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Reuse the KV blocks of equal prefixes.",
        rich_help_panel=_ENGINE,
    ),
]
InFlightSharing = Annotated[
    bool,
    typer.Option(
        "--in-flight-sharing/--no-in-flight-sharing",
        help="Compute equal prefixes of one step once; without it they are merged after the step.",
        rich_help_panel=_ENGINE,
    ),
]
LayerGroups = Annotated[
    bool,
    typer.Option(
        "--layer-groups/--no-layer-groups",
        help="Layers with sliding windows give back the KV blocks behind them.",
        rich_help_panel=_ENGINE,
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(help="Processes that the model is divided over.", rich_help_panel=_ENGINE),
]
Seed = Annotated[
    int, typer.Option(help="Seed of the engine's random draws.", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[
    int, typer.Option(help="New tokens at most, per prompt.", rich_help_panel=_SAMPLING)
]
MinTokens = Annotated[int, typer.Option(help="New tokens at least.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float,
    typer.Option(help="0 takes the likeliest token, always.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(help="Draw from the likeliest tokens of this mass.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int, typer.Option(help="Draw from the K likeliest; 0: all.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: repeat less.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Above 0: fewer tokens again.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Above 0: the more often, the less.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="End where this text appears; may be given again.", rich_help_panel=_SAMPLING
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the end token.", rich_help_panel=_SAMPLING),
]
