"""Packaging: editable, wheel, sdist and git each give a fresh environment the same whole package."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "recipes", "convert", "train", "eval")
PROGRAMS = ("convert-checkpoint", "unsoftmax-train", "unsoftmax-eval", "unsoftmax")

CHECK = """
import pathlib, sys
import unsoftmax
from unsoftmax.kernels.mixer import Mixer
from unsoftmax.kernels.registry import MIXERS
from unsoftmax.recipes.schema import load_recipe, recipe_names
from unsoftmax.convert.load import load
assert all(issubclass(m, Mixer) for m in MIXERS.values())
assert len([load_recipe(name) for name in recipe_names()]) == {recipes}
place = pathlib.Path(unsoftmax.__file__).resolve().parent
assert (place / "py.typed").exists()
print(unsoftmax.__version__, place)
"""


def run(*command, **options):
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=alone, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project as git knows it, links kept, committed in a repository of its own."""
    copy = tmp_path_factory.mktemp("tree") / "project"
    for name in run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split(
        "\0"
    ):
        if name and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    run("git", "init", "-q", cwd=copy)
    run("git", "add", "-A", cwd=copy)
    run("git", *who, "commit", "-q", "-m", "all", cwd=copy)
    return copy


def install(place, *what):
    """Install into a fresh environment, then let it see this one's packages in place of dependencies.

    In this order, or pip takes an unsoftmax that is installed here for the one it was asked for.
    """
    venv.create(place, with_pip=True)
    run(place / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", *what)
    site = next((place / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def built(tree, folder, kind):
    run(sys.executable, "-m", "build", f"--{kind}", "--outdir", folder, tree)
    return next(folder.iterdir())


WAYS = {
    "editable": lambda tree, folder: ("-e", tree),
    "wheel": lambda tree, folder: (built(tree, folder / "dist", "wheel"),),
    "sdist": lambda tree, folder: (built(tree, folder / "dist", "sdist"),),
    "git": lambda tree, folder: (f"git+file://{tree}",),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_install_has_every_folder_recipe_and_program(way, tree, tmp_path):
    fresh = tmp_path / "venv"
    install(fresh, *WAYS[way](tree, tmp_path))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    recipes = len(list((ROOT / "recipes").glob("*.yaml")))
    said = run(fresh / "bin" / "python", "-c", CHECK.format(recipes=recipes), cwd=elsewhere)
    home = tree / "src" if way == "editable" else fresh
    assert Path(said.split()[1]).is_relative_to(home.resolve())
    for name in PROGRAMS:
        assert run(fresh / "bin" / name, "--help", cwd=elsewhere).startswith(f"usage: {name} ")


@pytest.mark.slow
def test_the_wheel_holds_each_file_once_and_nothing_else(tree, tmp_path):
    with zipfile.ZipFile(built(tree, tmp_path, "wheel")) as wheel:
        names = [n for n in wheel.namelist() if ".dist-info/" not in n]
    wanted = [
        f"unsoftmax/{path.relative_to(tree)}"
        for folder in FOLDERS
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".json") and path.is_file()
    ]
    wanted += [f"unsoftmax/{p.name}" for p in (tree / "src" / "unsoftmax").glob("*.py")] + [
        "unsoftmax/py.typed"
    ]
    assert sorted(names) == sorted(wanted)


def test_no_folder_can_be_taken_for_hugging_face_s_kernels():
    """From the repository's root, `import kernels` must not find a package of ours."""
    for folder in ("kernels", "convert", "train", "eval"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "src" / "unsoftmax" / folder).is_symlink()
    code = "from transformers.utils.import_utils import is_kernels_available as f; f()"
    run(sys.executable, "-c", code, cwd=ROOT)
