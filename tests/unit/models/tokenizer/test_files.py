"""Tokenizers of folders: their tokens, texts and special tokens are those of transformers."""

import copy
import json
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pyengine.errors import ModelLoadError
from pyengine.models.tokenizer import Tokenizer, load_tokenizer
from tests.unit.models.tokenizer.kinds import KINDS, ODD, TEXTS

NAMED = [
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
]


def tokenizers(folder: Path) -> tuple[Tokenizer, Any]:
    ours = load_tokenizer(folder)
    assert type(ours) is Tokenizer
    return ours, AutoTokenizer.from_pretrained(folder)


def check_equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) and ours.vocab_size == theirs.vocab_size
    assert ours.get_vocab() == theirs.get_vocab()
    for name in (*NAMED, *(f"{name}_id" for name in NAMED)):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.model_max_length == theirs.model_max_length
    assert ours.chat_template == theirs.chat_template
    everything = list(range(len(theirs)))
    assert ours.convert_ids_to_tokens(everything) == theirs.convert_ids_to_tokens(everything)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            actual = ours(text, add_special_tokens=special, return_offsets_mapping=True)
            expected = theirs(text, add_special_tokens=special, return_offsets_mapping=True)
            assert actual == {name: expected[name] for name in actual}
            for skipped in (True, False):
                kept = {"skip_special_tokens": skipped}
                assert ours.decode(ids, **kept) == theirs.decode(ids, **kept)
                kept["clean_up_tokenization_spaces"] = True
                assert ours.decode(ids, **kept) == theirs.decode(ids, **kept)
    several = ours(TEXTS)
    assert several["input_ids"] == theirs(TEXTS)["input_ids"]
    assert ours.batch_decode(several["input_ids"]) == theirs.batch_decode(several["input_ids"])


@pytest.mark.parametrize("has_odd", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, has_odd: bool, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), eos_token="</s>", unk_token="<unk>", pad_token="<|end|>"
    )
    if has_odd:
        tokenizer.add_tokens(ODD)
    tokenizer.save_pretrained(tmp_path)
    check_equal(*tokenizers(tmp_path))


def change(folder: Path, name: str, **settings: Any) -> None:
    """Set values in a JSON file; None removes one."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= settings
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


@pytest.fixture(params=["byte level", "with bos", "words", "word piece"])
def folder(request: Any, tmp_path: Path) -> Path:
    KINDS[request.param]().save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return tmp_path


TOKEN = {"content": "<|odd|>", "lstrip": True, "rstrip": False, "normalized": False}
DECODER = {
    "0": {"content": "<|end|>", **dict.fromkeys(("lstrip", "rstrip", "normalized"), False)},
    "7000": {**TOKEN, "single_word": False, "special": False},
    "6999": {**TOKEN, "content": "<|plain|>", "single_word": True, "special": True},
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token": "<|end|>", "bos_token": "<s>", "add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
        {"add_bos_token": False, "bos_token": "<s>"},
        {"eos_token": {"__type": "AddedToken", **TOKEN}},
        {"added_tokens_decoder": DECODER},
        {"added_tokens_decoder": DECODER, "eos_token": "<|odd|>", "unk_token": "<|plain|>"},
        {"additional_special_tokens": ["<|odd|>", "</s>"]},
        {"extra_special_tokens": ["<|odd|>"], "eos_token": "<|plain|>"},
        {"extra_special_tokens": {"image_token": "<|odd|>"}, "audio_token": "<|plain|>"},
        {"model_max_length": 77, "padding_side": "left"},
        {"max_len": 78},
        {"clean_up_tokenization_spaces": True},
        {"split_special_tokens": True, "eos_token": "<|odd|>"},
        {"chat_template": "{{ messages }}"},
        {"chat_template": [{"name": "default", "template": "a"}, {"name": "b", "template": "c"}]},
        {"unk_token": None, "pad_token": None},
    ],
)
def test_settings_of_tokenizer_config(folder: Path, settings: dict[str, Any]) -> None:
    change(folder, "tokenizer_config.json", **settings)
    check_equal(*tokenizers(folder))


@pytest.mark.parametrize(
    "special",
    [
        {"eos_token": "<|odd|>", "bos_token": "<s>"},
        {"eos_token": {**TOKEN, "single_word": False}, "unk_token": "<unk>"},
        {"additional_special_tokens": ["<|extra|>", "<|more|>"], "pad_token": "<|end|>"},
    ],
)
@pytest.mark.parametrize("added", [{}, {"<|odd|>": 9001, "<|new|>": 9000, "<|plain|>": 9002}])
@pytest.mark.parametrize("is_listed", [False, True])
def test_older_files_of_special_tokens(
    folder: Path, special: dict[str, Any], added: dict[str, int], is_listed: bool
) -> None:
    """The newer list in tokenizer_config.json replaces both."""
    change(folder, "special_tokens_map.json", **special)
    if added:
        change(folder, "added_tokens.json", **added)
    if is_listed:
        change(folder, "tokenizer_config.json", added_tokens_decoder=DECODER, bos_token="<s>")
    check_equal(*tokenizers(folder))


@pytest.mark.parametrize("kind", ["byte level", "words"])
def test_padding_and_truncation_of_the_file_do_not_count(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=0, pad_token="<|end|>", length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    check_equal(*tokenizers(tmp_path))


def test_chat_templates_in_files_come_first(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template="old")
    (folder / "chat_template.jinja").write_text("{{ 'ä' }}\n", "utf-8")
    check_equal(*tokenizers(folder))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    check_equal(*tokenizers(folder))
    (folder / "chat_template.jinja").unlink()
    check_equal(*tokenizers(folder))


def test_the_chat_template_of_a_processor_is_the_last_choice(folder: Path) -> None:
    change(folder, "chat_template.json", chat_template="of images, too")
    assert load_tokenizer(folder).chat_template == "of images, too"
    change(folder, "tokenizer_config.json", chat_template="own")
    assert load_tokenizer(folder).chat_template == "own"


@pytest.mark.parametrize(
    ("kind", "family"), [("GPT2Tokenizer", "gpt2"), ("LlamaTokenizerFast", None)]
)
def test_special_tokens_that_a_class_has_without_the_files(
    kind: str, family: str | None, tmp_path: Path
) -> None:
    words = KINDS["words" if family is None else "byte level"]()
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, "tokenizer_config.json", model_max_length=1024)
    if family is None:
        change(tmp_path, "tokenizer_config.json", tokenizer_class=kind)
    else:
        change(tmp_path, "config.json", model_type=family)
    ours, theirs = tokenizers(tmp_path)
    for name in ("bos_token", "eos_token", "unk_token", "bos_token_id", "eos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name) is not None


def test_copies_share_the_backend_and_pickles_do_not(folder: Path) -> None:
    change(folder, "tokenizer_config.json", eos_token="<|odd|>", chat_template="{{ eos_token }}")
    ours = load_tokenizer(folder)
    copied, sent = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    assert copied.backend_tokenizer is ours.backend_tokenizer
    copied.chat_template = "other"
    assert ours.chat_template == "{{ eos_token }}"
    for other in (copied, sent):
        assert other.encode(TEXTS[2]) == ours.encode(TEXTS[2])
        assert other.eos_token_id == ours.eos_token_id
    assert not hasattr(ours, "no_such_token_id") and hasattr(ours, "eos_token_id")


FALLBACKS = {
    "tokenizer.json": "it has no tokenizer.json",
    "auto_map": "asks for Python code",
    "fast_tokenizer_files": "for each release",
    "fix_mistral_regex": "another splitting of words",
}


@pytest.mark.parametrize("what", FALLBACKS)
def test_transformers_reads_what_tokenizers_cannot(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyengine.models.tokenizer")
    tokenizer = KINDS["byte level"]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    change(tmp_path, "config.json", model_type="gpt2")
    if what == "tokenizer.json":
        tokenizer.model.save(str(tmp_path))
        (tmp_path / what).unlink()
    elif what == "auto_map":
        change(tmp_path, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.A", "own.B"]})
    else:
        value = True if what == "fix_mistral_regex" else ["tokenizer.json"]
        change(tmp_path, "tokenizer_config.json", **{what: value})
    loaded = load_tokenizer(tmp_path)
    assert not isinstance(loaded, Tokenizer)
    assert loaded.encode("Hello") == tokenizer.encode("Hello").ids
    assert FALLBACKS[what] in caplog.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"type": "no such"}}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"contents": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'),
        ("special_tokens_map.json", "5"),
        ("added_tokens.json", '{"a": "b", "c": 1}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, text: str | bytes) -> None:
    KINDS["byte level"]().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_threads_share_a_tokenizer(folder: Path) -> None:
    change(folder, "tokenizer_config.json", eos_token="<|odd|>")
    ours = load_tokenizer(folder)
    texts = [f"{text} {number}" for text in TEXTS for number in range(20)]
    expected = [ours.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert [*threads.map(ours.encode, texts)] == expected
            assert [*threads.map(ours.decode, expected)] == [*map(ours.decode, expected)]


CLASSES = {
    "gpt2": ("GPT2Tokenizer", "byte level"),
    "starcoder2": ("GPT2Tokenizer", "byte level"),
    "qwen2": ("Qwen2Tokenizer", "qwen"),
    "qwen3": ("Qwen2Tokenizer", "qwen"),
    "qwen3_moe": ("Qwen2Tokenizer", "qwen"),
    "cohere2": ("CohereTokenizer", "byte level"),
    "olmo": ("GPTNeoXTokenizer", "byte level"),
    "gemma2": ("GemmaTokenizer", "words"),
    "gemma3_text": ("GemmaTokenizer", "words"),
    "llama": ("LlamaTokenizer", "words"),
    "mistral": ("LlamaTokenizer", "words"),
}


@pytest.mark.parametrize("family", [*CLASSES][:6])
@pytest.mark.parametrize("is_added", [True, False])
def test_a_space_before_the_first_word_is_added_as_the_configuration_says(
    family: str, is_added: bool, tmp_path: Path
) -> None:
    name, kind = CLASSES[family]
    model = json.loads(KINDS[kind]().to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    spaces = {"add_prefix_space": not is_added}
    tokenizer = getattr(transformers, name)(vocab=model["vocab"], merges=merges, **spaces)
    tokenizer.save_pretrained(tmp_path)
    change(tmp_path, "config.json", model_type=family)
    change(tmp_path, "tokenizer_config.json", add_prefix_space=is_added)
    check_equal(*tokenizers(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_prefix_space": True}])
@pytest.mark.parametrize("family", CLASSES)
def test_folders_of_classes_of_transformers(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """transformers builds these from their vocabulary; tokenizer.json is the same tokenizer."""
    name, kind = CLASSES[family]
    model = json.loads(KINDS[kind]().to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = getattr(transformers, name)(vocab=model["vocab"], merges=merges, **settings)
    tokenizer.add_tokens(ODD)
    tokenizer.save_pretrained(tmp_path)
    change(tmp_path, "config.json", model_type=family)
    ours, theirs = tokenizers(tmp_path)
    if family == "olmo":  # its class forgets what tokenizer.json says of BOS
        theirs.backend_tokenizer.post_processor = ours.backend_tokenizer.post_processor
    check_equal(ours, theirs)
