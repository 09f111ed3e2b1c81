"""Tokens of GGUF files: the end of a turn, the first token of a prompt, and how text is split."""

import pytest
from tokenizers import pre_tokenizers

from pyengine import LLM, SamplingParams
from pyengine.errors import ModelLoadError
from pyengine.models.loader import load_model
from tests.unit.models.gguf_of_model import TOKENS, tiny_model, write_gguf_of

SPLIT, MODEL = "tokenizer.ggml.pre", "tokenizer.ggml.model"
BOS, EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"


def loaded(path, architecture="llama", **file):
    write_gguf_of(tiny_model(architecture), path, architecture, kind="Q8_0", **file)
    return load_model(path, device="cpu", dtype="float32")


@pytest.mark.parametrize("name", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_tokens_that_the_header_names_end_an_answer(tmp_path, name):
    values = {f"tokenizer.ggml.{name}_token_id": 6}
    assert loaded(tmp_path / "tiny.gguf", values=values).eos_token_ids == {1, 6}


ENDS = [
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<|end_of_text|>", "[EOS]", "<EOT>", "<turn|>", "<|return|>", "<|call|>"),
    *("<end_of_utterance>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
]


@pytest.mark.parametrize("text", ENDS)
def test_tokens_that_are_known_by_their_text_end_an_answer(tmp_path, text):
    tokens = ["<|im_start|>", "stop", "a", "b", "c", "ab", "bc", text]
    tokenizer = loaded(
        tmp_path / "tiny.gguf",
        tokens=tokens,
        values={"tokenizer.ggml.merges": ["a b", "b c"]},
    )
    assert tokenizer.eos_token_ids == {1, 7}


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|return|>", "<|call|>", "<|end|>"), {1, 2, 3}),
        (("<|flush|>", "<|calls|>", "<|end|>"), {1, 2, 3}),
        (("<|return|>", "x", "<|end|>"), {1, 2, 4}),
        (("<|tool_response>", "x", "</s>"), {1, 2}),
    ],
)
def test_tokens_after_which_an_answer_goes_on_do_not_end_it(tmp_path, texts, ends):
    tokens = ["<|im_start|>", "stop", *texts, "a", "b", "ab"]
    values = {"tokenizer.ggml.merges": ["a b"]}
    assert loaded(tmp_path / "tiny.gguf", tokens=tokens, values=values).eos_token_ids == ends


def test_several_ends_are_read(tmp_path):
    values = {"tokenizer.ggml.eos_token_ids": [1, 5, 6]}
    assert loaded(tmp_path / "tiny.gguf", values=values).eos_token_ids == {1, 5, 6}
    values = {"tokenizer.ggml.eos_token_ids": [1, 8]}
    with pytest.raises(ModelLoadError, match=r"eos_token_ids .* range from 0 to 7"):
        loaded(tmp_path / "tiny.gguf", values=values)


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_the_end_of_a_turn_is_no_text_whatever_type_it_has(tmp_path, kind):
    values = {
        "tokenizer.ggml.token_type": [3, kind, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = loaded(tmp_path / "tiny.gguf", values=values)
    assert tokenizer.eos_token_ids == {0, 1}
    assert tokenizer.tokenizer.encode("a<|im_end|>b") == [2, 1, 3]
    assert tokenizer.tokenizer.decode([2, 1], skip_special_tokens=True) == "a"


def test_a_chat_ends_with_the_turn(tmp_path):
    """Whatever token comes next, it is the end of a turn: one token, not `max_tokens`."""
    path = tmp_path / "tiny.gguf"
    model = tiny_model("llama")
    write_gguf_of(model, path, "llama")
    params = SamplingParams(temperature=0, max_tokens=8)
    whole = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(path, device="cpu", num_blocks=16) as llm:
        [output] = llm.generate([{"prompt_token_ids": [2, 3, 4]}], whole)
    [answer] = output.outputs
    assert len(answer.token_ids) == 8 and answer.finish_reason == "length"
    turn = answer.token_ids[2]
    write_gguf_of(model, path, "llama", values={"tokenizer.ggml.eot_token_id": turn})
    with LLM(path, device="cpu", num_blocks=16) as llm:
        [output] = llm.generate([{"prompt_token_ids": [2, 3, 4]}], params)
    [answer] = output.outputs
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == turn and len(answer.token_ids) <= 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [5, 4]),
        ({SPLIT: "llama-bpe"}, [0, 7]),
        ({SPLIT: "tekken"}, [0, 7]),
        ({SPLIT: "qwen2"}, [5, 4]),
        ({SPLIT: "llama-bpe", BOS: False}, [7]),
        ({SPLIT: "gpt-2", BOS: True}, [0, 5, 4]),
        ({BOS: True, EOS: True}, [0, 5, 4, 1]),
        ({EOS: True}, [5, 4, 1]),
    ],
)
def test_prompts_begin_and_end_as_the_file_says_or_llama_cpp_does(tmp_path, values, expected):
    tokenizer = loaded(tmp_path / "tiny.gguf", values=values).tokenizer
    assert tokenizer.encode("abc") == expected
    inner = [token for token in expected if token > 1]
    assert tokenizer.encode("abc", add_special_tokens=False) == inner


SENTENCES = {
    MODEL: "llama",
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0, -2.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.mark.parametrize(
    ("values", "expected", "text"),
    [
        ({}, [1, 7], "ab"),
        ({BOS: False}, [7], "ab"),
        ({"tokenizer.ggml.add_space_prefix": True}, [1, 7], "ab"),
        ({"tokenizer.ggml.add_space_prefix": False}, [1, 6], "ab"),
        ({"tokenizer.ggml.add_space_prefix": False}, [1, 7], " ab"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}, [1, 7], "ab"),
    ],
)
def test_sentencepiece_vocabularies(tmp_path, values, expected, text):
    tokenizer = loaded(tmp_path / "tiny.gguf", values=SENTENCES | values)
    assert tokenizer.tokenizer.encode(text) == expected
    assert tokenizer.tokenizer.decode(expected, skip_special_tokens=True) == text
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize(("has_prefix", "expected"), [(True, [1, 7]), (False, [1, 6])])
def test_the_space_before_the_first_word_is_that_of_the_file(
    tmp_path, architecture, has_prefix, expected
):
    values = SENTENCES | {"tokenizer.ggml.add_space_prefix": has_prefix}
    tokenizer = loaded(tmp_path / "tiny.gguf", architecture, values=values).tokenizer
    assert tokenizer.encode("ab") == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == "ab"
    assert tokenizer.encode("ab ab")[-1] == 7


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("gpt-2", ["a", "\u01201234", "!!", "\u0120\u0120", "\u0120b"]),
        ("smollm", ["a", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120b"]),
        ("llama-bpe", ["a", "\u0120", "123", "4", "!!", "\u0120\u0120", "\u0120b"]),
        ("stablelm2", ["a", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120b"]),
        ("qwen2", ["a", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120b"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, architecture, split, words):
    tokenizer = loaded(tmp_path / "tiny.gguf", architecture, values={SPLIT: split})
    splitter: pre_tokenizers.PreTokenizer = tokenizer.tokenizer.backend_tokenizer.pre_tokenizer
    assert [word for word, _ in splitter.pre_tokenize_str("a 1234!!   b")] == words


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({SPLIT: "unheard-of"}, r"tokenizer\.ggml\.pre \('unheard-of'\)"),
        ({SPLIT: 3}, r"tokenizer\.ggml\.pre \(3\) is not a string"),
        ({BOS: 1}, r"add_bos_token \(1\) is neither true nor false"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"tokenizer.ggml.add_sep_token": True}, "add_sep_token"),
        ({"tokenizer.ggml.normalizer.lowercase": True}, r"normalizer\.lowercase"),
        ({"tokenizer.ggml.suppress_tokens": [3]}, "suppress_tokens"),
        ({"tokenizer.ggml.unheard_of": True}, r"tokenizer\.ggml\.unheard_of"),
        ({"tokenizer.ggml.eot_token_id": len(TOKENS)}, r"eot_token_id \(8\)"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": "a"}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.token_type": [3, 3]}, r"token_type .*each of 8 tokens"),
        (SENTENCES | {"tokenizer.ggml.scores": 1.0}, r"scores .*each of 8 tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, values, match):
    with pytest.raises(ModelLoadError, match=match):
        loaded(tmp_path / "tiny.gguf", values=values)
