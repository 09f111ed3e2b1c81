"""GGUF files whose weights stay in their formats: the same model, without floats."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from pyengine.errors import ModelLoadError
from pyengine.models import gguf_weights
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import read_header
from pyengine.models.linear import FusedLinear, PackedEmbedding, PrepackedMLP, ProductLinear
from pyengine.models.loader import checked_source, load_model, model_properties
from pyengine.models.source import resolve_source
from tests.unit.models.tiny_gguf import VOCAB, write_tiny_gguf

TOKENS = torch.tensor([[2, 3, 4, 5, 6, 7, 0, 3]])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))


def kept(path, dtype="float32"):
    return load_model(resolve_source(path, keep_quantized=True), device="cpu", dtype=dtype)


def weight_of(layer):
    """The weight of a linear layer: its products with the rows of the identity."""
    bias = layer(torch.zeros(1, layer.in_features))
    return (layer(torch.eye(layer.in_features)) - bias).T


@pytest.mark.parametrize(
    ("architecture", "kind", "hidden"),
    [
        ("llama", "Q4_0", 32),
        ("llama", "Q4_1", 64),
        ("llama", "Q5_0", 32),
        ("llama", "Q5_1", 32),
        ("llama", "Q8_0", 32),
        ("llama", "Q4_K", 256),
        ("llama", "Q5_K", 256),
        ("llama", "Q6_K", 256),
        ("llama", "MXFP4", 32),
        ("qwen2", "Q8_0", 32),
        ("gemma3", "Q8_0", 32),
    ],
)
@torch.no_grad()
def test_a_model_is_that_of_the_converted_file(tmp_path, architecture, kind, hidden):
    path, scale = tmp_path / "tiny.gguf", 0.2
    write_tiny_gguf(
        path, architecture=architecture, kind=kind, hidden=hidden, layers=2, scale=scale
    )
    loaded, plain = kept(path), load_model(path, device="cpu", dtype="float32")
    assert loaded.quantization == kind
    assert not loaded.has_float_linears
    ours, theirs = loaded.model, plain.model
    for name, layer in theirs.named_modules():
        if type(layer) is nn.Linear:
            found = weight_of(ours.get_submodule(name))
            torch.testing.assert_close(found, layer.weight, rtol=2e-3, atol=2e-4)
    floats = dict(ours.named_parameters())
    assert floats
    for name, expected in theirs.named_parameters():
        if name in floats:
            torch.testing.assert_close(floats[name], expected, rtol=2e-3, atol=2e-3)
    embedded = ours.get_input_embeddings()
    assert type(embedded) is PackedEmbedding
    expected = theirs.get_input_embeddings()(TOKENS)
    torch.testing.assert_close(embedded(TOKENS), expected, rtol=2e-3, atol=2e-3)
    wanted = theirs(TOKENS).logits.log_softmax(-1)
    torch.testing.assert_close(ours(TOKENS).logits.log_softmax(-1), wanted, rtol=0, atol=0.1)
    assert loaded.eos_token_ids == plain.eos_token_ids
    assert loaded.max_model_len == plain.max_model_len
    assert loaded.tokenizer.get_vocab() == plain.tokenizer.get_vocab()


BY_NAME = [{"name": name, "template": f"{name} abc"} for name in ("default", "rag")]


@pytest.mark.parametrize("template", [None, "{{ 'abc' }}", BY_NAME])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_the_tokenizer_is_that_of_the_converted_file_without_lists(
    tmp_path, architecture, template
):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, architecture=architecture, kind="Q8_0", hidden=32, template=template)
    ours, theirs = kept(path).tokenizer, load_model(path, device="cpu").tokenizer
    assert type(ours) is PreTrainedTokenizerFast
    assert "_merges" not in vars(ours)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.encode("abc<|im_end|>ba") == theirs.encode("abc<|im_end|>ba")


@torch.no_grad()
def test_embeddings_are_the_numbers_of_the_file(tmp_path):
    from gguf import GGUFReader, dequantize

    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q5_0")
    stored = next(item for item in GGUFReader(path).tensors if item.name == "token_embd.weight")
    expected = dequantize(stored.data, stored.tensor_type)
    found = kept(path).model.get_input_embeddings()(torch.arange(VOCAB))
    assert np.array_equal(found.numpy(), expected)


def test_layers_of_one_format_are_one_product(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q4_0", kinds={"attn_v.weight": "Q8_0"})
    loaded = kept(path)
    layer = loaded.model.model.layers[0]
    attention = [getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"]
    assert [type(item) for item in attention] == [
        FusedLinear,
        FusedLinear,
        ProductLinear,
        ProductLinear,
    ]
    assert type(layer.mlp) is PrepackedMLP
    assert loaded.quantization == "Q4_0 and Q8_0"
    head = loaded.model.lm_head.product
    assert head._packed is loaded.model.model.embed_tokens.product._packed


def test_a_gate_in_another_format_is_multiplied_apart(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q4_0", kinds={"ffn_gate.weight": "Q8_0"}, scale=0.2, has_head=True)
    loaded, plain = kept(path), load_model(path, device="cpu", dtype="float32")
    torch.manual_seed(0)
    rows = torch.randn(3, 32)
    with torch.no_grad():
        found, expected = (each.model.model.layers[0].mlp(rows) for each in (loaded, plain))
    assert (found - expected).norm() < 0.03 * expected.norm()
    head = loaded.model.lm_head.product
    assert head._packed is not loaded.model.model.embed_tokens.product._packed


@torch.no_grad()
def test_float_matrices_beside_quantised_ones_are_ordinary_weights(tmp_path):
    path = tmp_path / "tiny.gguf"
    tensors = write_tiny_gguf(path, kind="Q8_0", kinds={"attn_output.weight": "F16"})
    loaded = kept(path)
    assert loaded.has_float_linears
    weight = loaded.model.model.layers[0].self_attn.o_proj.weight
    np.testing.assert_allclose(weight.numpy(), tensors["blk.0.attn_output.weight"], atol=2e-3)


@torch.no_grad()
def test_rows_are_of_the_asked_dtype(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0", architecture="gemma3", scale=0.2)
    exact = kept(tmp_path / "tiny.gguf").model(TOKENS).logits
    loaded = kept(tmp_path / "tiny.gguf", "bfloat16")
    found = loaded.model(TOKENS).logits
    assert found.dtype == loaded.dtype == torch.bfloat16
    assert {item.dtype for item in loaded.model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(found.float(), exact, rtol=0.1, atol=0.1)


def test_nothing_is_converted(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    loaded = kept(tmp_path / "tiny.gguf")
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name == "gguf" and loaded.path.parent == folder
    assert not list(loaded.path.glob("*.safetensors"))
    assert loaded.gguf == tmp_path / "tiny.gguf"
    assert checked_source(tmp_path / "tiny.gguf").gguf == loaded.gguf


def test_names_are_looked_up_once(tmp_path, monkeypatch):
    """And not once for every module, which takes seconds."""
    import gguf

    calls = []
    table = gguf.get_tensor_name_map
    monkeypatch.setattr(
        gguf, "get_tensor_name_map", lambda *given: (calls.append(given), table(*given))[1]
    )
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0", layers=2)
    assert kept(tmp_path / "tiny.gguf").gguf is not None
    assert len(calls) == 1


def test_a_damaged_description_is_made_again(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    folder = kept(tmp_path / "tiny.gguf").path
    (folder / "config.json").write_text("{")
    assert kept(tmp_path / "tiny.gguf").path == folder


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"kind": "F16"}, ""),
        ({"kind": "TQ2_0"}, "TQ2_0 cannot be kept"),
        ({"kind": "Q8_0", "kinds": {"ffn_up.weight": "TQ2_0"}}, "TQ2_0 cannot be kept"),
    ],
)
def test_other_formats_are_converted_by_name(tmp_path, file, message, caplog):
    write_tiny_gguf(tmp_path / "tiny.gguf", hidden=256, **file)
    source = resolve_source(tmp_path / "tiny.gguf", keep_quantized=True)
    assert source.gguf is None and source.folder.parent.name == "models"
    assert message in caplog.text


def test_float16_and_unknown_families_are_converted_by_name(tmp_path, caplog, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as tables

    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    assert kept(path, "float16").gguf is None
    assert "not multiplied in float16" in caplog.text
    monkeypatch.setitem(tables.TENSOR_PROCESSORS, "llama", tables.GPT2TensorProcessor)
    assert kept(path).gguf is None
    assert "weight is not a matrix of whole rows" in caplog.text
    assert checked_source(path).gguf is None


def test_modules_other_than_linear_layers_are_converted_by_name(tmp_path, caplog, monkeypatch):
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    monkeypatch.setattr(gguf_weights, "packed_embedding", lambda *given: None)
    assert kept(tmp_path / "tiny.gguf").gguf is None
    assert "Embedding is neither a linear layer nor a plain embedding" in caplog.text


def test_stored_blocks_are_those_of_one_file(tmp_path):
    found = []
    for number, scale in enumerate((1.0, 2.0)):
        path = tmp_path / f"{number}.gguf"
        write_tiny_gguf(path, kind="Q8_0", scale=scale)
        found.append(dict(model_properties(kept(path))))
    assert found[0]["config"] == found[1]["config"]
    assert found[0]["files"] != found[1]["files"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"left_out": ("blk.0.ffn_down.weight",)}, "lacks the weights of model.layers.0.mlp"),
        ({"left_out": ("token_embd.weight",)}, "lacks the weights of"),
        ({"left_out": ("output_norm.weight",)}, r"lacks the weights of model\.norm"),
        ({"declared": 3}, "declares 3 layers"),
        ({"layers": 2, "declared": 1}, "declares 1 layers"),
        ({"scale": np.nan}, "damaged"),
        ({"scale": np.inf}, "damaged"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_file_that_does_not_hold_what_it_declares_is_refused(tmp_path, file, message):
    write_tiny_gguf(tmp_path / "tiny.gguf", **{"kind": "Q8_0", **file})
    with pytest.raises(ModelLoadError, match=message):
        kept(tmp_path / "tiny.gguf")


def test_scales_that_are_not_finite_are_refused_with_the_name(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    tensor = next(item for item in read_header(path).tensors if "ffn_down" in item.name)
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"weights blk\.0\.ffn_down\.weight are damaged"):
        kept(path)


def test_a_shape_that_the_header_does_not_ask_for_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    content = path.read_bytes()
    shape = np.array([64, 32], "<u8").tobytes()
    assert content.count(shape) == 1
    path.write_bytes(content.replace(shape, np.array([32, 64], "<u8").tobytes()))
    with pytest.raises(ModelLoadError, match=r"have the shape \[64, 32\], and its header asks for"):
        kept(path)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """The process lives on: nothing is mapped."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    kept(path)
    read = GGUFFile.read

    def cut(file, tensor, out):
        os.truncate(path, tensor.offset + 3)
        read(file, tensor, out)

    monkeypatch.setattr(GGUFFile, "read", cut)
    with pytest.raises(ModelLoadError, match=r"was cut while it was read.* has 3 of"):
        kept(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "was changed while"),
        (lambda path: os.utime(path, ns=(1, 1)), "was changed while"),
        (lambda path: path.unlink(), None),
    ],
)
def test_files_that_change_while_they_are_read(tmp_path, monkeypatch, change, message):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    source = resolve_source(path, keep_quantized=True)
    monkeypatch.setattr(gguf_weights, "plan_weights", after(change, path))
    if message is None:
        assert load_model(source, device="cpu").gguf == path
    else:
        with pytest.raises(ModelLoadError, match=message):
            load_model(source, device="cpu")


def after(change, path, made=gguf_weights.plan_weights):
    def changed(*given):
        change(path)
        return made(*given)

    return changed


def test_a_file_that_is_gone_or_another_before_it_is_read_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    source = resolve_source(path, keep_quantized=True)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelLoadError, match="cut short"):
        load_model(source, device="cpu")
    path.unlink()
    with pytest.raises(ModelLoadError, match=f"{path} cannot be read"):
        load_model(source, device="cpu")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(replace(source, gguf=tmp_path), device="cpu")


def test_header_bytes_are_never_mapped(tmp_path, monkeypatch):
    """transformers maps the file that it reads, and gets a copy of the header."""
    import transformers

    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    folders = []
    known = transformers.AutoTokenizer.from_pretrained

    def noted(folder, *others, **named):
        folders.append(folder)
        return known(folder, *others, **named)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", noted)
    resolve_source(path, keep_quantized=True)
    assert not folders[0].exists()
    assert path.parent not in folders
