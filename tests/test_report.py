"""The page, the plots, slot lifetimes, and runs side by side."""

import dataclasses
import json
import math
import re
import xml.dom.minidom

import pytest
import torch

from tiny import tiny_source
from unsoftmax.convert.load import load
from unsoftmax.eval.compare import compare, read_log, short_names, smooth
from unsoftmax.eval.lifetimes import lifetimes_of, slot_lifetimes, summarise
from unsoftmax.eval.plot import Curve, Plot, figure
from unsoftmax.eval.report import Row, write_report
from unsoftmax.kernels.gsa.layer import GSAOptions

TASK = {
    "task": "arc_easy",
    "metric": "acc",
    "filter": "none",
    "shots": [0],
    "items": 50,
    "items_in_full": 2376,
    "score": 0.4321,
    "stderr": 0.0711,
    "teacher": 0.5123,
    "teacher_stderr": 0.0712,
}


def measurement(ppl):
    return {
        "ppl": ppl,
        "nll": math.log(ppl),
        "standard_error": 0.01,
        "recall_nll": ppl / 10,
        "tokens": 2040,
        "rows": 8,
        "recall_tokens": 90,
        "by_position": [
            {"from": 1, "to": 64, "ppl": 2 * ppl, "tokens": 63},
            {"from": 64, "to": 128, "ppl": 0.875 * ppl, "tokens": 64},
        ],
    }


ROWS = [Row("teacher", measurement(12.34)), Row("window <60> & sinks", measurement(17.89), [TASK])]
LIFETIMES = [
    {
        "layer": n,
        "slots": {
            "sinks": {"p10": 512.0, "median": 512.0, "p90": 512.0, "kept": 1.0},
            "ring": {"p10": 30.0, "median": 30.0, "p90": 30.0, "kept": 0.0},
            "memory": {"p10": 101.0, "median": 203.0, "p90": 307.0, "kept": 0.125},
        },
    }
    for n in range(3)
]


@pytest.fixture
def page(tmp_path):
    loss = Plot("Training loss", "tokens", "nats a token", [Curve("trained", [(0, 3.0), (2048, 2.5)], 1)])
    path = write_report(
        tmp_path / "new" / "report.html",
        ROWS,
        [loss],
        title="A <model> & its report",
        lifetimes=LIFETIMES,
        facts=[("machine", "2 CPU cores")],
        notes=["Lower is better."],
    )
    return path.read_text()


def test_the_page_holds_every_number(page):
    for shown in (
        "12.34",
        "17.89",
        "1.234",
        "24.68",
        "15.65",
        "0.4321",
        "± 0.071",
        "203",
        "101",
        "307",
        "12% kept",
    ):
        assert shown in page, shown
    assert "perplexity at 64-127" in page
    assert "arc_easy acc, 0 shots, 50 items, limited" in page
    assert page.count("<figure>") == 3, "loss, perplexity by position, slot lifetimes"


def test_the_page_loads_nothing(page):
    assert not re.search(
        r"<(script|link|img|iframe|object|embed|base)\b|\burl\(|@import|\bsrc=|\bhref=", page
    )
    assert "://" not in page


def test_names_are_shown_as_text_and_never_as_markup(page):
    assert "window &lt;60&gt; &amp; sinks" in page and "<60>" not in page and "<model>" not in page


def test_every_drawing_is_well_formed_and_stays_inside_its_frame(page):
    for drawing in re.findall(r"<svg viewBox=\"0 0 480 300\".*?</svg>", page, flags=re.S):
        root = xml.dom.minidom.parseString(drawing)
        for line in root.getElementsByTagName("polyline"):
            for point in line.getAttribute("points").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= 480 and 0 <= y <= 300


@pytest.mark.parametrize(
    "points",
    [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, math.nan), (2, 3.0)], [(0, 5.0), (10, 1e9)], [(0, -1.0)]],
    ids=["one point", "all alike", "a value is not a number", "a huge range", "nothing a log axis can show"],
)
@pytest.mark.parametrize("log", [False, True], ids=["even axes", "log axes"])
def test_any_curve_can_be_drawn(points, log):
    drawn = figure(Plot("t", "x", "y", [Curve("c", points)], log_x=log, log_y=log))
    assert "nan" not in drawn and "inf" not in drawn
    assert ("<svg" in drawn) == any(math.isfinite(y) and (not log or (x > 0 and y > 0)) for x, y in points)


# Lifetimes


def ring_gates(T, R, floor=-9.0):
    gates = torch.zeros(T, 1, R)
    gates[torch.arange(T), 0, torch.arange(T) % R] = floor
    return gates


def test_a_ring_of_r_slots_keeps_each_token_for_r_tokens():
    lives, share = lifetimes_of(ring_gates(64, 8))
    found = summarise(lives, share)
    assert found == pytest.approx({"p10": 8, "median": 8, "p90": 8, "kept": 0})


def test_a_gate_of_a_tenth_of_ln_2_halves_in_ten_tokens():
    lives, share = lifetimes_of(torch.full((100, 2, 3), -math.log(2) / 10, dtype=torch.float64))
    found = summarise(lives, share)
    assert found is not None and found["median"] == 10


def test_what_is_never_overwritten_counts_as_kept():
    gates = torch.zeros(40, 1, 1)
    gates[0] = -9.0
    found = summarise(*lifetimes_of(gates))
    assert found is not None and found["kept"] == 1
    assert summarise(*lifetimes_of(torch.zeros(40, 1, 1))) is None, "nothing was written"


def test_the_lifetimes_of_a_converted_model_are_those_of_its_rings(tmp_path):
    plain = GSAOptions(num_slots=16, sinks=2)
    memory = GSAOptions(num_slots=(16, 12), sinks=2, recent=8)
    entries = [{"name": "gsa", **dataclasses.asdict(options)} for options in (plain, memory)]
    model = load(tiny_source(tmp_path / "source"), layer_mixers=[entries[0], {"name": "softmax"}, entries[1]])
    found = {layer["layer"]: layer["slots"] for layer in slot_lifetimes(model, torch.randint(0, 256, (100,)))}
    assert list(found) == [0, 2], "layer 1 kept its softmax"
    assert found[0]["others"] == pytest.approx({"p10": 14, "median": 14, "p90": 14, "kept": 0})
    assert list(found[2]) == ["sinks", "others"]
    assert found[2]["others"]["p10"] >= 8, "the latest 8 stay"
    assert found[2]["others"]["p90"] > found[0]["others"]["p90"], "and some for longer than in a ring"
    assert found[2]["sinks"]["kept"] == 1


# Side by side


def result(path, ppl, teacher=True):
    return {
        "format": 1,
        "checkpoint": {"path": path},
        "teacher": {"path": "models/T"} if teacher else None,
        "rows": [TASK],
        "text": {"checkpoint": measurement(ppl), "teacher": measurement(11.0) if teacher else None},
    }


def run_folder(folder, ppl):
    folder.mkdir(parents=True)
    lines = [
        {"kind": "train", "step": n, "tokens": 100 * n, "loss": 3.0 - n / 10, "lr": 1e-4} for n in range(1, 6)
    ]
    lines.append({"kind": "held_out", "step": 5, "tokens": 500, **measurement(ppl)})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo')
    return folder


def test_results_and_runs_stand_side_by_side_with_one_teacher(tmp_path):
    for name, ppl in (("a", 21.5), ("b", 22.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(result(f"models/{name}", ppl)))
    run = run_folder(tmp_path / "c", 23.5)
    said = []
    page = compare(
        [tmp_path / "a", tmp_path / "b" / "results.json", run], out=tmp_path / "page.html", say=said.append
    )
    assert said[0].split() == ["teacher", "T", "a", "b", "c"]
    perplexity = next(line for line in said if line.startswith("perplexity "))
    assert re.findall(r"(\S+) ±", perplexity) == ["11.00", "21.50", "22.50", "23.50"]
    html = page.read_text()
    assert "Training loss" in html and "21.50" in html and "0.5123" in html


def test_a_log_whose_last_line_was_cut_is_read_up_to_there(tmp_path):
    log = read_log(run_folder(tmp_path / "run", 20.0) / "log.jsonl")
    assert [row["step"] for row in log.train] == [1, 2, 3, 4, 5]
    assert [row["ppl"] for row in log.held_out] == [20.0]


def test_a_folder_as_out_gets_the_page_in_it(tmp_path):
    run = run_folder(tmp_path / "c", 23.5)
    (tmp_path / "pages").mkdir()
    for out in (tmp_path / "pages", tmp_path / "pages" / "new"):
        page = compare([run], out=out, say=lambda line: None)
        assert page == out / "report.html" and page.is_file()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"--out .*page\.html: .*file is a file"):
        compare([run], out=tmp_path / "file" / "page.html", say=lambda line: None)


def test_a_path_with_nothing_to_compare_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"holds neither results.json .* nor log.jsonl"):
        compare([tmp_path])
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x.json is not a results.json"):
        compare([tmp_path / "x.json"])


def test_names_are_the_shortest_endings_that_differ():
    assert short_names(["runs/a/export", "runs/b/export"]) == ["a/export", "b/export"]
    assert short_names(["runs/a", "runs/b"]) == ["a", "b"]


def test_smoothing_is_a_running_mean():
    points = [(n, float(n % 2)) for n in range(100)]
    assert smooth(points)[50:52] == [(50, pytest.approx(0.4)), (51, pytest.approx(0.6))]
    assert smooth(points[:3]) == points[:3]
