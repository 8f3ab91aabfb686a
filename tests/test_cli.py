"""The command line: exit status 0, 1 or 2, one message, nothing half-written, and a --help that is fast."""

import subprocess
import sys

import pytest
import torch

import unsoftmax
from tiny import tiny_source
from unsoftmax import cli

VERBS = {
    "convert-checkpoint": cli.convert_checkpoint,
    "unsoftmax-train": cli.train,
    "unsoftmax-eval": cli.evaluate,
    "unsoftmax": cli.main,
}


@pytest.mark.parametrize("name", VERBS)
def test_help_says_what_the_verb_does_and_its_exit_status(name, capsys):
    with pytest.raises(SystemExit) as end:
        VERBS[name](["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert said.startswith(f"usage: {name} ") and "Exit status: 0 done; 1 the run failed; 2" in said


@pytest.mark.parametrize("name", VERBS)
def test_every_command_says_its_version(name, capsys):
    with pytest.raises(SystemExit) as end:
        VERBS[name](["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"{name} {unsoftmax.__version__}\n"


@pytest.mark.parametrize("verb", ["fetch", "demo", "compare", "explain", "export", "doctor"])
def test_every_verb_of_unsoftmax_has_help(verb, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0 and f"usage: unsoftmax {verb}" in capsys.readouterr().out


def test_help_imports_nothing_slow():
    code = (
        "import sys\nfrom unsoftmax import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'yaml', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


WRONG = {  # verb, its words, what the one message says
    "an unknown recipe": ("convert-checkpoint", ["a", "out", "--recipe", "demoo"], "Did you mean demo?"),
    "an unknown key": (
        "convert-checkpoint",
        ["a", "out", "--recipe", "demo", "--set", "mixer.num_slot=3"],
        "Did you mean mixer.num_slots?",
    ),
    "text for a number": (
        "unsoftmax-train",
        ["demo", "--run", "run", "--set", "train.peak_lr=3e-5"],
        "write 3.0e-5",
    ),
    "a source that is not there": ("convert-checkpoint", ["./none", "out", "--recipe", "demo"], "./none"),
    "an unknown suite": ("unsoftmax-eval", ["none", "--suite", "papre"], "paper"),
    "an unknown checkpoint to fetch": ("unsoftmax", ["fetch", "smollm", "out"], "Did you mean smollm2-135m?"),
    "a device that torch does not know": (
        "unsoftmax-eval",
        ["none", "--device", "gpu"],
        "--device is 'gpu'; it must be cpu, cuda or cuda:N, such as cpu",
    ),
    "a GPU that is not there": ("unsoftmax-eval", ["none", "--device", "cuda:99"], "--device is 'cuda:99'"),
    "nothing to compare": ("unsoftmax", ["compare", "none"], "none"),
    "no run to export": ("unsoftmax", ["export", "none", "out"], "none"),
}


@pytest.mark.parametrize("name, words, said", WRONG.values(), ids=WRONG)
def test_wrong_input_ends_with_2_and_one_message_and_writes_nothing(
    name, words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert VERBS[name](words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{name}: ") and said in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["frobnicate"], [], ["fetch"], ["fetch", "a", "b", "--cach", "c"]], ids=str
)
def test_words_that_do_not_parse_end_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2 and capsys.readouterr().err.startswith("usage: unsoftmax")


def fails_with(error, monkeypatch):
    def doctor():
        raise error

    monkeypatch.setattr("unsoftmax.doctor.doctor", doctor)
    return cli.main(["doctor"])


def test_a_run_that_fails_ends_with_1(monkeypatch, capsys):
    assert fails_with(OSError(28, "No space left on device"), monkeypatch) == 1
    assert capsys.readouterr().err == "unsoftmax: [Errno 28] No space left on device\n"


def test_a_failure_that_is_not_ours_shows_its_traceback(monkeypatch, capsys):
    assert fails_with(KeyError("surprise"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


FAILURES = {  # what our own code does, whether its message stands alone
    "a failure that we describe": ("raise RuntimeError('look above')", True),
    "numbers that are not finite": ("raise FloatingPointError('look above')", True),
    "a key that is not there": ("{}['look above']", False),
    "a wrong type": ("len(1)", False),
    "a division by zero": ("1 / 0", False),
    "torch called wrongly": ("import torch; torch.ones(2) @ torch.ones(3)", False),
    "too deep a recursion": ("raise RecursionError('look above')", False),
}


@pytest.mark.parametrize("code, alone", FAILURES.values(), ids=FAILURES)
def test_only_a_failure_that_we_describe_ends_without_its_traceback(code, alone, monkeypatch, capsys):
    ours = {"__name__": "unsoftmax.doctor"}
    exec(f"def doctor():\n    {code}", ours)
    monkeypatch.setattr("unsoftmax.doctor.doctor", ours["doctor"])
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert ("Traceback" in said) != alone
    if alone:
        assert said == "unsoftmax: look above\n"


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    assert fails_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""


def test_doctor_lists_versions_and_passes_every_mixer_here(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and "gsa            cpu: ok" in said and "WRONG" not in said


def test_doctor_tells_a_mixer_that_forgets_its_state(monkeypatch, capsys):
    from unsoftmax.kernels.window.layer import WindowAttention

    forward = WindowAttention.forward

    def forgetful(self, x, *, rotary, state=None, **options):
        return forward(self, x, rotary=rotary, state=None, **options)

    monkeypatch.setattr(WindowAttention, "forward", forgetful)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert "window         cpu: WRONG" in printed.out
    assert printed.err == (
        "unsoftmax: the self-test failed for window on cpu; please report it with the above\n"
    )


def test_convert_checkpoint_converts_and_its_dry_run_does_not(tmp_path, capsys):
    source, out = tiny_source(tmp_path / "source"), tmp_path / "out"
    words = [str(source), str(out), "--recipe", "demo", "--set", "calibration.tokens=1024"]
    words += [
        "--set",
        "mixer.num_slots=8",
        "--set",
        "mixer.sinks=1",
        "--set",
        "mixer.recent=3",
    ]
    assert cli.convert_checkpoint([*words, "--dry-run"]) == 0
    assert not out.exists() and "nothing was written" in capsys.readouterr().out
    assert cli.convert_checkpoint([*words, "--no-verify"]) == 0
    assert (out / "config.json").is_file()
    assert cli.convert_checkpoint(words) == 2
    assert f"{out}" in capsys.readouterr().err
