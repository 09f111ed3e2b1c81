"""GGUF files: refused when they are none, converted once when they are."""

import os
import struct

import numpy as np
import pytest

from pyengine.core.errors import ModelLoadError
from pyengine.models import gguf
from pyengine.models.gguf import check_gguf, converted_gguf

HIDDEN, HEADS, VOCAB, FEED = 32, 2, 8, 64


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))


def write_tiny_gguf(path) -> dict[str, np.ndarray]:
    """A llama of one layer with a byte-pair vocabulary of eight tokens."""
    from gguf import GGUFWriter

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(48)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "bc", "abc"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b c", "a bc"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FEED, HIDDEN),
        "blk.0.ffn_up.weight": (FEED, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED),
    }
    tensors = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"\0" * 40])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a GGUF file") as caught:
        converted_gguf(path)
    assert repr(content[:4]) in str(caught.value)


def test_an_unknown_version_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 99, 0, 0))
    with pytest.raises(ModelLoadError, match="version 99"):
        check_gguf(path)


def test_a_truncated_gguf_is_refused_and_leaves_no_folder(tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelLoadError, match=r"model\.gguf could not be converted"):
        converted_gguf(path)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_gguf_is_converted_once_and_again_when_it_changes(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    conversions = []
    monkeypatch.setattr(gguf, "_convert", lambda source, folder: conversions.append(source))
    first = converted_gguf(path)
    assert converted_gguf(path) == first
    assert conversions == [path]
    assert first.name.startswith("tiny-")
    progress = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0].split(" (")[0] for line in progress] == [
        "pyengine: preparing tiny.gguf",
        f"pyengine: tiny.gguf is ready in {first}",
    ]
    os.utime(path, ns=(1, 1))
    assert converted_gguf(path) != first
    assert len(conversions) == 2


def test_weights_and_tokenizer_come_through(tmp_path):
    from pyengine.models import load_model

    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert (loaded.name, loaded.max_model_len, loaded.vocab_size) == ("tiny", 48, VOCAB)
    assert loaded.eos_token_ids == {1}
    assert loaded.tokenizer.encode("abc") == [5, 4]
    layer = loaded.model.model.layers[0]
    embedding = loaded.model.model.embed_tokens.weight
    assert np.array_equal(embedding.detach().numpy(), tensors["token_embd.weight"])
    down = layer.mlp.down_proj.weight.detach().numpy()
    assert np.array_equal(down, tensors["blk.0.ffn_down.weight"])
    assert not hasattr(loaded.config, "quantization_config")
