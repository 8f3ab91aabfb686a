"""Opening a source, planning where its tensors go, and copying them: nothing lost, nothing guessed."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tiny import tiny_model, tiny_source
from unsoftmax.convert import source as source_module
from unsoftmax.convert.config import convert_config
from unsoftmax.convert.model import CONVERTED_MODELS
from unsoftmax.convert.source import INDEX, SINGLE, open_source, read_header
from unsoftmax.convert.weights import differing_copies, plan_weights, skeleton, write_weights

MEMORY = {"name": "gsa", "num_slots": 16, "sinks": 2, "recent": 8}


def planned(folder: Path, entry: dict | None = None, **opening):
    source = open_source(folder, **opening)
    config = convert_config(source.config, [entry or MEMORY] * source.config.num_hidden_layers)
    model = skeleton(CONVERTED_MODELS[source.family], config)
    return source, plan_weights(source, config, model)


def zeros(plan) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(new.shape, dtype=new.dtype) for key, new in plan.new.items()}


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "delete"}))


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / SINGLE)
    edit(weights)
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


# ---- the plan and the copy


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_copied_tensors_keep_their_bits_and_their_shards(family, shards, tmp_path):
    folder = tiny_source(tmp_path / "source", family, shards=shards, dtype=torch.bfloat16)
    source, plan = planned(folder)
    new = {key: torch.randn(item.shape) for key, item in plan.new.items()}
    (tmp_path / "out").mkdir()
    counted = []
    write_weights(source, plan, new, tmp_path / "out", lambda name, n: counted.append(n))

    written = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    original = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    assert written.keys() == original.keys() | new.keys()
    for key, tensor in (original | new).items():
        assert written[key].dtype == tensor.dtype and torch.equal(written[key], tensor), key
    assert sum(counted) == sum(t.numel() * t.element_size() for t in written.values())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in folder.glob("model*")}
    if shards:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(counted)
        for key, name in index["weight_map"].items():
            with safe_open(tmp_path / "out" / name, "pt") as shard:
                assert key in shard.keys()  # noqa: SIM118, a safetensors handle is no mapping
        assert index["weight_map"].keys() == written.keys()


def test_wide_tensors_come_first_so_that_each_is_aligned(tmp_path):
    source, plan = planned(tiny_source(tmp_path / "s", dtype=torch.bfloat16))
    write_weights(source, plan, zeros(plan), tmp_path)
    entries = read_header(tmp_path / SINGLE).values()
    sizes = [entry.dtype.itemsize for entry in sorted(entries, key=lambda entry: entry.start)]
    assert sizes == sorted(sizes, reverse=True) and {2, 4} == set(sizes)


def test_the_missing_set_is_exactly_what_the_mixers_declare(tmp_path):
    _, plan = planned(tiny_source(tmp_path / "s"))
    names = ("importance.weight", "importance.decay")
    assert plan.new.keys() == {f"model.layers.{i}.self_attn.{n}" for i in range(3) for n in names}
    assert all(item.dtype == torch.float32 for item in plan.new.values())
    assert planned(tmp_path / "s", {"name": "softmax"})[1].new == {}


def test_the_plan_adds_up_to_every_source_key_target_key_and_config_field(tmp_path):
    folder = tiny_source(tmp_path / "s", tie_word_embeddings=True)
    source, plan = planned(folder)
    assert set(plan.copied) | plan.unused.keys() == source.entries.keys()
    assert set(plan.copied) | plan.derived.keys() | plan.new.keys() == plan.shapes.keys()
    fields = json.loads((folder / "config.json").read_text())
    assert set(plan.fields_carried) | plan.fields_changed.keys() == fields.keys()
    assert plan.derived == {"lm_head.weight": "tied to model.embed_tokens.weight"}
    assert sorted(k for keys in plan.files.values() for k in keys) == sorted([*plan.copied, *plan.new])
    assert "  source keys  29 = 29 copied + 0 unused" in plan.lines()


def test_every_config_value_is_carried_even_where_none_is_the_default(tmp_path):
    odd = {
        "rms_norm_eps": 3e-4,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
    }
    odd |= {"max_position_embeddings": 99, "head_dim": 10, "attention_bias": True, "mlp_bias": True}
    source = open_source(tiny_source(tmp_path / "s", "llama", **odd))
    got = convert_config(source.config, [MEMORY] * 3).to_dict()
    for key, value in source.raw_config.items():
        if key not in ("architectures", "model_type", "transformers_version", "dtype"):
            assert got[key] == value, key


def test_rotary_tables_of_old_checkpoints_are_not_needed(tmp_path):
    folder = tiny_source(tmp_path / "s")
    edit_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    _, plan = planned(folder)
    assert plan.unused == {"model.layers.0.self_attn.rotary_emb.inv_freq": "computed from config.json"}


def test_a_stored_head_is_unneeded_when_tied_and_equal_and_refused_when_it_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "PIECE_BYTES", 128)  # one row
    folder = tiny_source(tmp_path / "s", tie_word_embeddings=True)
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" in planned(folder)[1].unused
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:-1].clone()}))
    with pytest.raises(ValueError, match="differs"):
        planned(folder)
    edit_weights(folder, lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        planned(folder)


def test_copying_holds_small_pieces_only():
    """A 256 MB tensor passes through in less than half of that."""
    program = """
import resource, sys, tempfile, json, struct
from pathlib import Path
from unsoftmax.convert.source import Entry, Source, read_header
from unsoftmax.convert.weights import Plan, write_weights
folder = Path(sys.argv[1])
size = 256 << 20
header = json.dumps({"w": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
with (folder / "model.safetensors").open("wb") as f:
    f.write(struct.pack("<Q", len(header)) + header)
    f.truncate(8 + len(header) + size)
source = Source("s", folder, {}, read_header(folder / "model.safetensors"))
plan = Plan(("w",), {}, {}, {}, {"out.safetensors": ("w",)}, {}, (), {})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
write_weights(source, plan, {}, folder)
print(peak() - before)
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True
        )
        assert int(done.stdout.splitlines()[-1]) < 128 << 10  # KiB


def test_a_copy_that_differs_by_one_bit_is_found(tmp_path):
    folder = tiny_source(tmp_path / "s", dtype=torch.bfloat16)
    source, plan = planned(folder, {"name": "softmax"})
    (tmp_path / "out").mkdir()
    write_weights(source, plan, {}, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text((folder / "config.json").read_text())
    assert differing_copies(source, plan, open_source(tmp_path / "out")) == []
    edit_weights(tmp_path / "out", lambda w: w["model.norm.weight"].view(torch.int16)[3].bitwise_xor_(1))
    assert differing_copies(source, plan, open_source(tmp_path / "out")) == ["model.norm.weight"]


# ---- the hash


def test_the_hash_is_of_config_and_weights(tmp_path):
    folder = tiny_source(tmp_path / "s", shards=True)
    before = open_source(folder).sha256()
    (folder / "README.md").write_text("hello")
    assert open_source(folder).sha256() == before
    edit_config(folder, rms_norm_eps=2e-6)
    assert open_source(folder).sha256() != before


# ---- what is refused


def truncate(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])


def point_at_lfs(folder: Path) -> None:
    next(folder.glob("model-*.safetensors")).write_text("version https://git-lfs.github.com/spec/v1\noid 1\n")


def index_edit(edit):
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def header_edit(edit, shard_number=1):
    """Change the header of a shard; its data and the length field stay right."""

    def apply(folder: Path) -> None:
        shard = next(folder.glob(f"model-0000{shard_number}-*.safetensors"))
        raw = shard.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        text = json.dumps(edit(header) or header).encode()
        shard.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


EMBEDDING = "model.embed_tokens.weight"


def overlap(header: dict) -> None:
    """Two tensors of one size lie in one place, and the file's length is that of the last one's end."""
    tensors = sorted((item for key, item in header.items() if key[0] != "_"), key=lambda i: i["data_offsets"])
    pairs = ((a, b) for a in tensors for b in tensors[:-1] if a is not b and a["shape"] == b["shape"])
    first, second = next(pairs)
    second["data_offsets"] = first["data_offsets"]


def backwards(header: dict) -> None:
    header[EMBEDDING]["data_offsets"].reverse()


BROKEN_FILES = {
    "no config": (lambda f: (f / "config.json").unlink(), r"is no checkpoint: it has no config\.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: not valid JSON"),
    "no weights": (
        lambda f: [p.unlink() for p in f.glob("model*")],
        r"has config\.json but no weights",
    ),
    "a shard is missing": (
        lambda f: sorted(f.glob("model-*"))[0].unlink(),
        r"shards are missing: model-00001",
    ),
    "a shard is cut short": (truncate, r"model-00002.*bytes long and its header says"),
    "a shard is a pointer": (point_at_lfs, r"Git LFS pointer.*git lfs pull"),
    "a shard is empty": (
        lambda f: sorted(f.glob("model-*"))[0].write_bytes(b""),
        r"model-00001.*cut short \(0 bytes\)",
    ),
    "the index names a key no shard holds": (
        index_edit(lambda m: m.update({"model.ghost": min(m.values())})),
        r"names model\.ghost in model-00001.*does not hold it",
    ),
    "the index leaves a key out": (
        index_edit(lambda m: m.pop("model.norm.weight")),
        r"holds model\.norm\.weight, for which .* names nothing",
    ),
    "the index points outside": (
        index_edit(lambda m: m.update({"model.norm.weight": "../model.safetensors"})),
        r"must lie beside the index",
    ),
    "the index names a number": (
        index_edit(lambda m: m.update({"model.norm.weight": 3})),
        r"index\.json: weight_map names 3 for model\.norm\.weight; it must be",
    ),
    "a header entry without dtype": (
        header_edit(lambda h: h[EMBEDDING].pop("dtype") and None),
        r"model-00001.*: its header does not say dtype, .* of model\.embed_tokens\.weight rightly",
    ),
    "a header entry that is a number": (
        header_edit(lambda h: h.update({EMBEDDING: 7})),
        r"model-00001.*of model\.embed_tokens\.weight rightly",
    ),
    "a header entry with a shape of text": (
        header_edit(lambda h: h[EMBEDDING].update({"shape": "264 x 32"})),
        r"model-00001.*of model\.embed_tokens\.weight rightly",
    ),
    "a header that is a list": (
        header_edit(lambda h: [h]),
        r"model-00001.*: its header is a list, not a table of tensors",
    ),
    "a header whose metadata is a number": (
        header_edit(lambda h: h.update({"__metadata__": 5})),
        r"model-00001.*: __metadata__ of its header is 5",
    ),
    "tensors that overlap": (
        header_edit(overlap, 2),
        r"model-00002.*: model\.layers\S+ starts at byte \d+, but model\.layers\S+ ends at byte",
    ),
    "offsets the wrong way round": (
        header_edit(backwards),
        r"model-00001.*: model\.embed_tokens\.weight of shape \[264, 32\] takes -33792 bytes",
    ),
}


@pytest.mark.parametrize("case", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_folder_is_refused_by_file_and_key(case, tmp_path):
    damage, message = case
    folder = tiny_source(tmp_path / "s", shards=True)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        open_source(folder)


BROKEN_CONFIGS = {
    "architecture": ({"model_type": "gpt2"}, r"model_type is 'gpt2'.*there are: llama, mistral"),
    "converted already": ({"model_type": "unsoftmax_llama"}, r"converted already"),
    "a classifier": (
        {"architectures": ["LlamaForSequenceClassification"]},
        r"must be \['LlamaForCausalLM'\]",
    ),
    "rope type": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        r"rope_type is 'spiral'; there are: default, linear",
    ),
    "rope type, older spelling": ({"rope_scaling": {"type": "su"}}, r"rope_scaling\.rope_type is 'su'"),
    "query heads": ({"num_key_value_heads": 3}, r"num_attention_heads 4 is not a multiple of .* 3"),
    "head size": ({"head_dim": None, "num_attention_heads": 6}, r"hidden_size 32 is not a multiple of .* 6"),
    "no heads": ({"num_attention_heads": 0}, r"num_attention_heads is 0; it must be"),
    "text for a number": ({"hidden_size": "32"}, r"hidden_size is '32'; it must be a whole number"),
    "linear without factor": (
        {"rope_scaling": {"type": "linear"}},
        r"config\.json: rope_scaling\.factor is missing; rope_type 'linear' needs it: .*such as 8\.0",
    ),
    "llama3 without its frequencies": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
        r"rope_parameters\.low_freq_factor is missing; rope_type 'llama3' needs it: .*such as 1\.0",
    ),
    "llama3 with equal frequencies": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 2.0,
            }
        },
        r"rope_scaling\.high_freq_factor is 2\.0; it must be above low_freq_factor 2\.0, such as 8\.0",
    ),
    "a factor in words": (
        {"rope_scaling": {"rope_type": "yarn", "factor": "two"}},
        r"rope_scaling\.factor is 'two'; it must be a number of at least 1, such as 8\.0",
    ),
    "theta as text": ({"rope_theta": "x"}, r"config\.json: rope_theta is 'x'; it must be a number above 0"),
    "theta below zero": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        r"rope_parameters\.rope_theta is -1; it must be a number above 0, such as 10000\.0",
    ),
    "an odd head": ({"head_dim": 7}, r"head_dim is 7; it must be an even whole number, such as 128"),
    "an odd head that follows": (
        {"head_dim": None, "hidden_size": 20},
        r"hidden_size 20 / num_attention_heads 4 is a head of 5; .* even",
    ),
    "a head in text": ({"head_dim": "8"}, r"head_dim is '8'; it must be"),
    "a head of nothing": ({"head_dim": 0}, r"head_dim is 0; it must be"),
    "positions as text": (
        {"max_position_embeddings": "128"},
        r"max_position_embeddings is '128'; it must be a whole number of at least 1, such as 2048",
    ),
    "no positions": ({"max_position_embeddings": 0}, r"max_position_embeddings is 0; it must be"),
    "epsilon as text": ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps is '1e-5'; it must be .*such as 1e-05"),
    "an unknown activation": ({"hidden_act": "swosh"}, r"hidden_act is 'swosh'; it must be one of .*silu"),
    "yes for true": ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes'; it must be true or"),
    "padding beyond the vocabulary": (
        {"pad_token_id": 264},
        r"pad_token_id is 264; it must be null or below vocab_size 264, such as 0",
    ),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config is set"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS.values(), ids=BROKEN_CONFIGS)
def test_a_config_that_cannot_be_converted_is_refused_by_field(case, tmp_path):
    fields, message = case
    folder = tiny_source(tmp_path / "s")
    edit_config(folder, **fields)
    with pytest.raises(ValueError, match=r"config\.json: " + message if "gpt2" in message else message):
        open_source(folder)


SCALINGS = {
    "linear": {"type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": None},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_every_rotary_scaling_of_real_checkpoints_opens(scaling, tmp_path):
    folder = tiny_source(tmp_path / "s")
    config = json.loads((folder / "config.json").read_text()) | {"rope_scaling": scaling, "pad_token_id": -1}
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "rope_theta": 10000}))
    assert open_source(folder).config.rope_parameters["factor"] == scaling["factor"]


MISFITS = {
    "a key nobody needs": (lambda w: w.update({"model.extra": torch.ones(1)}), r"model\.extra has no place"),
    "a bias the config denies": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        r"q_proj\.bias has no place.*attention_bias",
    ),
    "a key that is absent": (
        lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
        r"no shard holds model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "another shape": (
        lambda w: w.update({"model.norm.weight": torch.ones(31)}),
        r"model\.norm\.weight is 31, and by config\.json it must be 32",
    ),
}


@pytest.mark.parametrize("case", MISFITS.values(), ids=MISFITS)
def test_weights_that_do_not_fit_the_config_are_refused_by_key(case, tmp_path):
    edit, message = case
    folder = tiny_source(tmp_path / "s")
    edit_weights(folder, edit)
    with pytest.raises(ValueError, match=message):
        planned(folder)


def test_a_config_field_the_family_does_not_know_is_refused(tmp_path):
    folder = tiny_source(tmp_path / "s")
    edit_config(folder, logit_softcap=30.0)
    with pytest.raises(ValueError, match="logit_softcap"):
        planned(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value, tmp_path):
    folder = tiny_source(tmp_path / "s", dtype=torch.bfloat16)
    edit_weights(folder, lambda w: w["model.layers.2.mlp.up_proj.weight"].view(-1)[7].fill_(value))
    source, plan = planned(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN or inf"):
        write_weights(source, plan, zeros(plan), tmp_path / "out")


def test_pickles_are_refused_unless_asked_for_and_then_copied_exactly(tmp_path):
    model = tiny_model()
    folder = tiny_source(tmp_path / "s")
    (folder / SINGLE).unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickles \(pytorch_model\.bin\).*--allow-pickle"):
        open_source(folder)
    source, plan = planned(folder, allow_pickle=True)
    (tmp_path / "out").mkdir()
    write_weights(source, plan, zeros(plan), tmp_path / "out")
    written = load_file(tmp_path / "out" / SINGLE)
    assert all(torch.equal(written[key], value) for key, value in model.state_dict().items())


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = tiny_source(tmp_path / "s")
    (folder / SINGLE).unlink()
    torch.save({"model.norm.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: cannot be read weights-only"):
        open_source(folder, allow_pickle=True)


def test_a_name_that_is_no_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        open_source(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give the folder"):
        open_source(tmp_path / "file")


def test_pieces_put_together_are_the_tensor(tmp_path, monkeypatch):
    folder = tiny_source(tmp_path / "s", dtype=torch.bfloat16)
    monkeypatch.setattr(source_module, "PIECE_BYTES", 100)
    source = open_source(folder)
    for key in source.entries:
        pieces = list(source.pieces(key))
        assert max(len(p) for p in pieces) <= 50
        assert torch.equal(torch.cat(pieces).view(source.entries[key].shape), source.read(key))
