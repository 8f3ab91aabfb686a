"""Scoring: stock lm-eval tasks on local files, the teacher beside, and what must not be scored."""

import dataclasses
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForCausalLM

from tiny import tiny_source
from unsoftmax.convert.load import load
from unsoftmax.eval.harness import count_letters, evaluate, model_hash
from unsoftmax.eval.localdata import MissingData, local_datasets, read
from unsoftmax.eval.suites import SUITES, Suite, Task, missing_data, named_suite

QUESTION = {
    "question": "Which is a colour?",
    "subject": "anatomy",
    "choices": ["red", "ten", "low", "is"],
    "answer": 0,
}
SMALL = Suite(
    "small",
    (
        Task("mmlu_anatomy", 5, "cais/mmlu"),
        Task("bbh_cot_fewshot_boolean_expressions", 3, "SaylorTwift/bbh"),
        Task("nq_open", 5, "google-research-datasets/nq_open"),
        Task("arc_easy", 0, "allenai/ai2_arc"),
        Task("lambada_openai", 0, "EleutherAI/lambada_openai"),
        Task("fda", 0, "hazyresearch/based-fda", optional=True),
    ),
    rows=3,
    row_tokens=256,
)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Data sets in three layouts: a README header, a folder a configuration, plain splits."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("test", 24), ("dev", 5)):
        rows = [{**QUESTION, "answer": n % 4} for n in range(count)]
        write(folder / f"mmlu/{split}/anatomy.parquet", rows)
    (folder / "mmlu/README.md").write_text(
        "---\nconfigs:\n- config_name: anatomy\n  data_files:\n"
        "  - split: test\n    path: test/anatomy.parquet\n"
        "  - split: dev\n    path: dev/anatomy.parquet\n---\n"
    )
    sums = [{"input": "not True is", "target": "False"}] * 2
    write(folder / "SaylorTwift/bbh/boolean_expressions/test-00000-of-00001.parquet", sums)
    answers = [{"question": f"half of {n}", "answer": [str(n / 2)]} for n in (2, 4, 6)]
    answers += [{"question": f"half of {n}", "answer": [str(n // 2)]} for n in (8, 10, 12)]
    write(folder / "nq_open/validation.parquet", answers)
    write(folder / "nq_open/train.parquet", answers)
    choices = {"text": ["ice", "fire", "rock"], "label": ["A", "B", "C"]}
    arc = {"id": "1", "question": "What is cold?", "choices": choices, "answerKey": "A"}
    write(folder / "arc/ARC-Easy/test.parquet", [arc] * 3)
    write(folder / "lambada_openai/test.parquet", [{"text": "the cat sat on the mat"}] * 3)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text("\n\n".join(f"Line {n} of a text about boats and rivers." for n in range(60)))
    return str(path)


def checkpoint(folder, seed=0, spoil=None):
    """A random two-layer Llama over bytes, with its tokenizer."""
    tiny_source(folder, seed=seed, num_hidden_layers=2, max_position_embeddings=2048)
    if spoil is not None:
        model = load(folder)
        with torch.no_grad():
            spoil(model)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models_at(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {n: checkpoint(folder / n, seed) for seed, n in enumerate(("student", "teacher"))}


@pytest.fixture(scope="module")
def scored(models_at, data, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    said = []
    result = evaluate(
        models_at["student"],
        teacher=models_at["teacher"],
        suite=SMALL,
        data=data,
        limit=20,
        out=out,
        text=text,
        max_new_tokens=4,
        device="cpu",
        say=said.append,
    )
    return result, out, said


def test_every_task_is_scored_with_its_own_shots_and_the_teacher_beside(scored):
    result, _, _ = scored
    shots = {row["task"]: row["shots"] for row in result["rows"]}
    assert shots == {
        "mmlu_anatomy": [5],
        "bbh_cot_fewshot_boolean_expressions": [3],
        "nq_open": [5],
        "arc_easy": [0],
        "lambada_openai": [0],
    }
    assert all(row["teacher"] is not None for row in result["rows"])
    assert all(row["difference"] == row["score"] - row["teacher"] for row in result["rows"])
    perplexity = next(row for row in result["rows"] if row["metric"] == "perplexity")
    assert perplexity["difference"] != 0, "the teacher's row repeats the student's"
    assert result["text"]["checkpoint"]["rows"] == result["text"]["teacher"]["rows"] == 3


def test_the_written_files_hold_scores_errors_settings_and_versions(scored):
    result, out, _ = scored
    stored = json.loads((out / "results.json").read_text())
    assert stored["rows"][0]["stderr"] is not None
    assert stored["settings"]["shots"]["nq_open"] == 5
    assert {"torch", "transformers", "lm_eval", "datasets", "unsoftmax", "python"} <= set(stored["versions"])
    page = (out / "results.md").read_text()
    for row in result["rows"]:
        assert f"| {row['task']} | {row['metric']}" in page
    assert "recall nll" in page


def test_a_limit_is_marked_where_it_cut_items_off(scored):
    result, out, _ = scored
    page = (out / "results.md").read_text()
    assert result["limited"] and "Limited to 20 items" in page
    assert "20 of 24 (limited)" in page, "mmlu_anatomy has 24 items"
    assert "| 3 | 1.0 |" in page, "arc_easy has 3 items: nothing was cut off"


def test_the_letters_chosen_are_counted(scored):
    letters = scored[0]["tasks"]["checkpoint"]["mmlu_anatomy"]["letters"]
    assert sum(letters["chosen"].values()) == 20
    assert letters["right"] == {"A": 5, "B": 5, "C": 5, "D": 5}


def test_a_model_that_always_answers_a_is_told():
    class Choice:
        OUTPUT_TYPE = "multiple_choice"

    def stuck_at(best):
        likelihoods = [
            [(-1.0, False) if place == best(n) else (-2.0, False) for place in range(4)] for n in range(40)
        ]
        samples = [{"filtered_resps": found, "target": n % 4} for n, found in enumerate(likelihoods)]
        counted = count_letters({"task": samples}, {"task": Choice()})
        assert counted is not None
        return counted["always"]

    assert stuck_at(lambda n: 0) == "A"
    assert stuck_at(lambda n: n % 4) is None


def test_answers_that_no_model_could_give_are_counted(scored):
    generated = scored[0]["tasks"]["checkpoint"]["nq_open"]["generated"]
    assert generated["unreachable"] == 0.5, "the stop rule ends at '.': three answers are 1.0, 2.0 and 3.0"
    assert "." in generated["stop"]
    boolean = scored[0]["tasks"]["checkpoint"]["bbh_cot_fewshot_boolean_expressions"]["generated"]
    assert boolean["no_answer"] == 1.0, "four random bytes hold no 'the answer is'"


def test_an_optional_task_without_data_is_listed_with_what_it_needs(scored):
    result, out, said = scored
    assert "hazyresearch/based-fda" in result["not_run"]["fda"]
    assert "not run: fda needs the data set hazyresearch/based-fda" in (out / "results.md").read_text()
    assert any(line.startswith("not run: fda") for line in said)


def test_the_recall_suite_runs_on_local_files(models_at, tmp_path):
    passage = {"doc_id": "1", "file_name": "f", "key": "name", "question": "?", "title": "t", "context": "c"}
    for name in ("fda", "swde", "squad"):
        write(
            tmp_path / name / "validation.parquet",
            [{**passage, "text": "Name: Ann. Name:", "value": "Ann"}] * 2,
        )
    suite = dataclasses.replace(SUITES["recall"], rows=0, planted=())
    result = evaluate(
        models_at["student"],
        suite=suite,
        data=tmp_path,
        max_new_tokens=4,
        device="cpu",
        say=lambda line: None,
    )
    assert {row["task"]: row["items"] for row in result["rows"]} == {
        "fda": 2,
        "swde": 2,
        "squad_completion": 2,
    }
    assert result["not_run"] == {}


def test_a_hub_that_cannot_be_reached_is_told_with_the_way_out(models_at, monkeypatch):
    suite = Suite("nq", SMALL.tasks[2:3], rows=0)
    with pytest.raises(
        ValueError, match=r"could not be had from the hub .* give --data DIR with .* DIR/nq_open"
    ):
        evaluate(models_at["student"], suite=suite, device="cpu", say=lambda line: None)


def test_a_run_goes_on_from_the_answers_it_has(models_at, data, scored, monkeypatch, text):
    _, out, _ = scored
    suite = Suite("again", SMALL.tasks[:1], rows=0)
    calls = []
    forward = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    evaluate(
        models_at["student"], suite=suite, data=data, limit=20, out=out, device="cpu", say=lambda line: None
    )
    assert len(calls) == 1, "only the check of the model itself runs it"


def test_required_data_that_is_missing_is_named_before_a_model_is_loaded(tmp_path):
    (tmp_path / "mmlu").mkdir()
    with pytest.raises(ValueError, match=r"bbh_cot_fewshot needs the data set SaylorTwift/bbh: no .*bbh"):
        evaluate(tmp_path / "no-model", suite="paper", data=tmp_path)


def test_too_few_worked_examples_are_named(models_at, tmp_path, text):
    write(tmp_path / "nq_open/validation.parquet", [{"question": "pi", "answer": ["3"]}])
    with pytest.raises(ValueError, match=r"nq_open needs 6 items.* has 0 in the split 'train'"):
        suite = Suite("nq", SMALL.tasks[2:3], rows=0)
        evaluate(models_at["student"], suite=suite, data=tmp_path, device="cpu", say=lambda line: None)


def not_a_number(model):
    model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")


def blown_up(model):
    model.lm_head.weight.mul_(1e4)


def blind(model):
    model.lm_head.weight.zero_()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (not_a_number, r"model.layers.1.mlp.up_proj.weight has 1 of 1,536 values that are not finite"),
        (blown_up, "has collapsed: its loss on plain English"),
        (blind, "has collapsed: it predicts the same"),
    ],
    ids=["a weight is not a number", "outputs blown up", "the same whatever the text"],
)
def test_a_model_that_means_nothing_is_refused_by_name(spoil, message, tmp_path, text):
    folder = checkpoint(tmp_path / "spoilt", spoil=spoil)
    with pytest.raises(ValueError, match=message) as refused:
        evaluate(
            folder, suite=SUITES["text"], text=text, device="cpu", out=tmp_path / "out", say=lambda line: None
        )
    assert "spoilt" in str(refused.value)
    assert not (tmp_path / "out").exists()


BAD_ARGUMENTS = {
    "a suite with a typo": ({"suite": "papre"}, "Did you mean 'paper'"),
    "a limit of none": ({"limit": 0}, "--limit is 0"),
    "an unknown dtype": ({"dtype": "fp8"}, "--dtype is 'fp8'; it must be one of bf16"),
    "data that is a file": ({"data": "pyproject.toml"}, "is not a folder"),
}


def test_a_teacher_with_other_tokens_is_refused(models_at, tmp_path, text):
    other = shutil.copytree(models_at["teacher"], tmp_path / "other")
    file = other / "tokenizer.json"
    words = json.loads(file.read_text())
    words["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(words))
    with pytest.raises(ValueError, match=r"--teacher .*other cuts text into other tokens than .*student"):
        evaluate(models_at["student"], teacher=other, suite="text", text=text, device="cpu")


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_wrong_arguments_say_what_would_be_right(arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate("nowhere", **arguments)


def test_results_cannot_go_to_a_file(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"--out .*out is a file; name a folder"):
        evaluate("nowhere", suite="text", device="cpu", out=tmp_path / "out")


def test_rows_that_changed_are_never_served_from_a_cache(tmp_path):
    for answer in ("old", "new"):
        write(tmp_path / "nq_open/validation.parquet", [{"question": "q", "answer": [answer]}])
        assert read(tmp_path / "nq_open")["validation"][0]["answer"] == [answer]


def test_a_split_that_is_not_there_is_empty_and_a_configuration_that_is_not_there_is_named(data):
    splits = read(data / "arc", "ARC-Easy")
    assert len(splits["test"]) == 3 and len(splits["train"]) == 0
    with pytest.raises(MissingData, match="configuration ARC-Challenge"):
        read(data / "arc", "ARC-Challenge")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"piqa/validation.parquet cannot be read as parquet"):
        read(tmp_path / "piqa")


def test_the_stock_loader_is_back_after_use(data):
    import datasets

    stock = datasets.load_dataset
    with local_datasets(data) as files:
        datasets.load_dataset("allenai/ai2_arc", "ARC-Easy")
        assert list(files) == ["arc/ARC-Easy/test.parquet"]
    assert datasets.load_dataset is stock


def test_the_hash_tells_models_apart_and_knows_the_same_again(models_at):
    student, again, teacher = (load(models_at[n]) for n in ("student", "student", "teacher"))
    assert model_hash(student) == model_hash(again) != model_hash(teacher)


def test_the_papers_suite_has_the_papers_shots():
    assert {task.name: task.shots for task in named_suite("paper").tasks} == {
        "mmlu": 5,
        "bbh_cot_fewshot": 3,
        "nq_open": 5,
    }


def test_missing_data_names_every_task_without_a_folder(tmp_path):
    assert set(missing_data(SUITES["core"], tmp_path)) == {task.name for task in SUITES["core"].tasks}


@pytest.mark.slow
def test_the_papers_suite_runs_whole_on_local_files(models_at, tmp_path, text, data):
    from lm_eval.tasks import TaskManager

    groups = {"mmlu": "mmlu", "bbh_cot_fewshot": "bbh"}
    for member in TaskManager().match_tasks(["mmlu_*", "bbh_cot_fewshot_*"]):
        name = member.removeprefix("mmlu_").removeprefix("bbh_cot_fewshot_")
        if member.startswith("bbh_cot"):
            write(
                tmp_path / f"{groups['bbh_cot_fewshot']}/test/{name}.parquet", [{"input": "a", "target": "b"}]
            )
        else:
            for split, count in (("test", 1), ("dev", 5)):
                write(tmp_path / f"mmlu/{split}/{name}.parquet", [QUESTION] * count)
    (tmp_path / "nq_open").symlink_to(data / "nq_open")
    suite = dataclasses.replace(SUITES["paper"], rows=1, row_tokens=128)
    result = evaluate(
        models_at["student"],
        suite=suite,
        data=tmp_path,
        limit=1,
        text=text,
        max_new_tokens=2,
        device="cpu",
        say=lambda line: None,
    )
    tasks = result["tasks"]["checkpoint"]
    assert len(tasks["mmlu"]["members"]) == 57 and tasks["mmlu"]["items"] == 57
    assert len(tasks["bbh_cot_fewshot"]["members"]) == 27
