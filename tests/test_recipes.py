"""Recipes: those we ship load, what a run needs follows from them, each mistake gets its remedy."""

import subprocess
import sys

import pytest

from unsoftmax.recipes.schema import (
    accumulation,
    layer_mixers,
    load_recipe,
    parse_recipe,
    recipe_names,
    total_steps,
)

SHIPPED = [
    "demo",
    "llama-3.1-8b-gsa",
    "mistral-7b-gsa",
    "mistral-7b-polysketch",
    "smollm2-135m-gsa",
    "smollm2-135m-polysketch",
]


def test_every_recipe_that_we_ship_is_listed():
    assert recipe_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_and_its_dict_reads_back_equal(name):
    recipe = load_recipe(name)
    assert parse_recipe(recipe.to_dict()) == recipe
    assert layer_mixers(recipe, 3) == [recipe.to_dict()["mixer"]] * 3


@pytest.mark.parametrize("name", [n for n in SHIPPED if "7b" in n or "8b" in n])
def test_the_large_recipes_follow_the_published_conversion(name):
    recipe = load_recipe(name)
    t = recipe.train
    assert (t.peak_lr, t.warmup_steps, t.schedule) == (3e-5, 512, "linear")
    assert (recipe.data.context_tokens, t.batch_tokens, t.total_tokens) == (2048, 2**21, 20 * 10**9)
    assert total_steps(recipe) == 9537
    assert [accumulation(recipe, world) for world in (1, 8, 32)] == [256, 32, 8]


def test_the_demo_runs_25_steps_on_one_or_two_processes():
    recipe = load_recipe("demo")
    assert total_steps(recipe) == 25
    assert accumulation(recipe, 1) == 2 * accumulation(recipe, 2)


def test_set_changes_one_key_and_leaves_the_rest():
    recipe = load_recipe(
        "demo", ["train.peak_lr=1.0e-5", "softmax_layers=[0, 2]", "data.sources.0.text=corpus/"]
    )
    assert recipe.train.peak_lr == 1e-5
    assert recipe.data.sources[0].text == "corpus/"
    assert recipe.train.warmup_steps == load_recipe("demo").train.warmup_steps
    names = [entry["name"] for entry in layer_mixers(recipe, 4)]
    assert names == ["softmax", "gsa", "softmax", "gsa"]


def test_the_source_s_own_attention_can_be_kept_everywhere(tmp_path):
    recipe = load_recipe(write(tmp_path, "source: a/b\nmixer: {name: softmax}\n"))
    assert layer_mixers(recipe, 2) == [{"name": "softmax"}] * 2


def write(folder, text):
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def message(name, *overrides):
    with pytest.raises(ValueError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


FILES = {  # what is in mine.yaml, what the message says
    "an unknown key": ("sauce: a\nmixer: {name: gsa}", "sauce is not a key. Did you mean source?"),
    "an unknown nested key": (
        "{source: a, mixer: {name: gsa}, train: {peek_lr: 0.1}}",
        "train.peek_lr is not a key. Did you mean train.peak_lr?",
    ),
    "a missing key": ("mixer: {name: gsa}", "source is missing"),
    "a missing mixer": ("source: a", "mixer is missing"),
    "a mixer without a name": ("source: a\nmixer: {}", "mixer.name is missing; it is one of: gsa"),
    "an unknown mixer": (
        "source: a\nmixer: {name: gas}",
        "mixer.name: gas is not a mixer. Did you mean gsa?",
    ),
    "an unknown option": (
        "source: a\nmixer: {name: gsa, num_slot: 3}",
        "mixer.num_slot is not an option of gsa. Did you mean mixer.num_slots?",
    ),
    "an option of softmax": (
        "source: a\nmixer: {name: softmax, sinks: 3}",
        "mixer.sinks: softmax has no options",
    ),
    "a key given twice": ("source: a\nsource: b\nmixer: {name: gsa}", "line 2: source is given twice"),
    "a list for a key": ("source: a\n[a, b]: c", "line 2: a list stands where a key must"),
    "a mapping for a key": (
        "source: a\nmixer:\n  {a: b}: c",
        "line 3: a list of keys stands where a key must",
    ),
    "no mapping": ("- a\n- b", "this file holds a list"),
    "an empty file": ("", "this file holds empty"),
    "broken YAML": ("source: [a\nmixer: {", "line 2"),
    "a scalar in place of keys": (
        "source: a\nmixer: gsa",
        "mixer is the text 'gsa'; it must hold keys: name",
    ),
}


@pytest.mark.parametrize("text, said", FILES.values(), ids=FILES)
def test_a_mistake_in_a_file_names_the_file_and_the_remedy(text, said, tmp_path):
    path = write(tmp_path, text)
    assert said in message(path)
    assert message(path).startswith(path)


VALUES = {  # what is set in smollm2-135m-gsa, what the message says
    "3e-5 is text to YAML": ("train.peak_lr=3e-5", "the text '3e-5'; it must be a number: write 3.0e-5"),
    "1e4 wants a dot and a sign": ("train.new_lr_scale=1e4", "write 1.0e+4"),
    "20e9 is text to YAML": ("train.total_tokens=20e9", "must be a whole number: write 20000000000"),
    "a fraction for a count": (
        "train.warmup_steps=2.5",
        "train.warmup_steps is 2.5; it must be a whole number, such as 2",
    ),
    "a seed too large": (
        "train.seed=4294967296",
        "train.seed is 4294967296; it must be from 0 to 4294967295",
    ),
    "another": ("calibration.seed=-1", "calibration.seed is -1; it must be from 0 to 4294967295"),
    "true for an integer": ("train.seed=true", "train.seed is true; it must be a whole number"),
    "true for a number": ("train.peak_lr=true", "train.peak_lr is true; it must be a number"),
    "1 for true": ("train.activation_checkpointing=1", "is 1; it must be true or false"),
    "no is false to YAML": ("source=no", "source is false to YAML; it must be text: write it in quotes"),
    "not a number": ("train.beta1=.nan", "train.beta1 is nan; it must be a finite number"),
    "nothing": ("train.batch_tokens=", "train.batch_tokens is empty; it must be a whole number"),
    "below zero": ("train.peak_lr=-1.0", "train.peak_lr is -1.0; it must be above 0"),
    "zero rows": ("train.eval_rows=0", "train.eval_rows is 0; it must be at least 1"),
    "a negative layer": ("softmax_layers=[-1]", "softmax_layers is -1 in [-1]; it must be 0 or more"),
    "a layer twice": ("softmax_layers=[1, 1]", "a list that names a layer once"),
    "no list": ("softmax_layers=3", "softmax_layers is 3; it must be a list, such as [0, 8]"),
    "no choice": ("train.schedule=linaer", "linaer is not a choice. Did you mean linear?"),
    "a float for a choice": ("train.zero_stage=1.0", "train.zero_stage: 1.0 is not a choice"),
    "a warm-up as long as the run": ("train.warmup_steps=250", "it must be below the run's 250 steps"),
    "a mixer's own check": ("mixer.num_slots=0", "mixer.num_slots"),
    "another mixer's option": ("mixer.name=window", "mixer.num_slots is not an option of window"),
    "no equals sign": ("train.peak_lr", "write KEY=VALUE"),
    "no key": ("=3", "write KEY=VALUE"),
    "a key inside text": ("source.x=3", "source is the text 'smollm2-135m', without keys"),
    "an item that is not there": ("data.sources.3.text=a", "data.sources has items 0 to 0, not 3"),
    "broken YAML": ("train.peak_lr={", "--set train.peak_lr={"),
    "a pattern that YAML reads as an alias": (
        "calibration.text=*.foo",
        """must be in quotes, inside those of the shell: --set 'calibration.text="*.foo"'""",
    ),
    "a list for a key": ("mixer={[a]: b}", "a list stands where a key must"),
}


@pytest.mark.parametrize("override, said", VALUES.values(), ids=VALUES)
def test_a_mistaken_value_is_told_with_its_key_and_remedy(override, said):
    assert said in message("smollm2-135m-gsa", override)
    assert f"--set {override}" in message("smollm2-135m-gsa", override)


def test_a_pattern_works_as_the_message_says():
    assert load_recipe("demo", ['calibration.text="*.foo"']).calibration.text == "*.foo"


def test_a_batch_that_does_not_divide_gets_the_arithmetic_and_values_that_work():
    recipe = load_recipe("smollm2-135m-gsa")
    with pytest.raises(ValueError, match="does not divide over 3 processes") as caught:
        accumulation(recipe, 3)
    assert "12288 = 3 processes x train.micro_batch_sequences 4 x data.context_tokens 1024" in str(
        caught.value
    )
    assert "24576 (2 passes) or 36864 (3 passes), or use 2 processes." in str(caught.value)
    assert accumulation(load_recipe("smollm2-135m-gsa", ["train.batch_tokens=36864"]), 3) == 3


def test_a_smaller_micro_batch_is_offered_where_it_works():
    said = message("smollm2-135m-gsa", "train.micro_batch_sequences=3")
    assert "or train.micro_batch_sequences to 2 (16 passes)" in said
    assert accumulation(load_recipe("smollm2-135m-gsa", ["train.micro_batch_sequences=2"]), 1) == 16


def test_a_layer_that_the_source_does_not_have_is_refused():
    with pytest.raises(ValueError, match="names layer 30, but the source has 30 layers: 0 to 29"):
        layer_mixers(load_recipe("demo", ["softmax_layers=[30]"]), 30)


def test_an_unknown_recipe_gets_the_nearest_name_and_the_list():
    assert "demoo is not a recipe that we ship, nor a file. Did you mean demo?" in message("demoo")
    assert "does not exist. We ship: demo, " in message("there/is/none.yaml")


def test_a_folder_or_a_binary_file_is_no_recipe(tmp_path):
    assert "is a folder" in message(str(tmp_path) + "/")
    (tmp_path / "x.yaml").write_bytes(b"source: \xff\xfe")
    assert "not text in UTF-8 (byte 8)" in message(str(tmp_path / "x.yaml"))


def test_reading_the_schema_imports_no_torch():
    code = "import sys, unsoftmax.recipes.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_slots_may_be_a_number_for_each_head():
    recipe = parse_recipe({"source": "tiny", "mixer": {"name": "gsa", "num_slots": [7, 23], "recent": 2}})
    assert recipe.mixer.options.num_slots == (7, 23)
    assert parse_recipe(recipe.to_dict()) == recipe
    with pytest.raises(ValueError, match=r"mixer\.num_slots\.1 is .*whole number"):
        parse_recipe({"source": "tiny", "mixer": {"name": "gsa", "num_slots": [7, "a"], "recent": 2}})
