"""What the README says is so: its commands are ones we have, its table is what the tests cover."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from test_crossed import KINDS, SOURCES
from test_train import ENGINES
from unsoftmax import cli
from unsoftmax.kernels.registry import MIXERS
from unsoftmax.recipes.schema import load_recipe, recipe_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```\n(.*?)^```", README, re.S | re.M)
    for line in block.splitlines()
    if re.match(r"(make|unsoftmax\S*|convert-checkpoint|deepspeed) ", line)
]


def support_table() -> str:
    """Sources and kinds of layers, every pair of which test_crossed.py converts; how test_train.py trains."""
    columns = [list(names) for names in (SOURCES, KINDS, ENGINES)]
    titles = zip(columns, ("sources", "kinds of layers", "ways to train"))
    lines = ["| " + " | ".join(f"{len(names)} {title}" for names, title in titles) + " |", "|---|---|---|"]
    for n in range(max(map(len, columns))):
        lines.append("| " + " | ".join("".join(names[n : n + 1]) for names in columns) + " |")
    return "\n".join(lines)


def test_the_support_table_is_the_one_the_tests_cover():
    assert support_table() in README, "put this into README.md:\n" + support_table()


def test_every_folder_and_mixer_of_the_tree_exists():
    for name in [*MIXERS, "kernels", "recipes", "convert", "train", "eval", "benchmarks", "tests"]:
        assert f"{name}/" in README
    for path in re.findall(r"^  (\S+\.py)", README, re.M):
        assert list(ROOT.glob(f"*/{path}")), path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_is_one_we_have(command, capsys):
    words = shlex.split(command.split("#")[0])
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if words[0] == "deepspeed":
        words = words[words.index("unsoftmax-train") :]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    verb = getattr(cli, scripts[words[0]].split(":")[1])
    for name in re.findall(r"(?:--recipe|unsoftmax-train) (\S+)", command):
        assert name in recipe_names()
        load_recipe(name)
    # one argument more that does not exist: the only one that is not recognised, before anything is opened
    with pytest.raises(SystemExit) as stop:
        verb([*words[1:], "--no-such-argument"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: --no-such-argument\n")
