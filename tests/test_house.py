"""The house keeps its order: who imports whom, and no name that hides another package's."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEVEL = {"kernels": 0, "recipes": 1, "convert": 2, "train": 3, "eval": 3}
DRAWERS = {"util", "utils", "common", "misc", "helper", "helpers", "base", "core", "lib", "tools"}


def source_files() -> list[Path]:
    return [f for folder in LEVEL for f in sorted((ROOT / folder).rglob("*.py"))]


def imported(file: Path) -> set[str]:
    """Full dotted names of all that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file.relative_to(ROOT)}: imports are absolute"
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


def importers_of(package: str) -> list[str]:
    return [
        str(f.relative_to(ROOT))
        for f in source_files()
        if any(n.split(".")[0] == package for n in imported(f))
    ]


@pytest.mark.parametrize("folder", LEVEL)
def test_a_folder_imports_only_itself_and_what_is_left_of_it(folder):
    for file in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(file):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == "unsoftmax" and other in LEVEL:
                allowed = other == folder or LEVEL[other] < LEVEL[folder]
                assert allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_kernels_import_nothing_but_torch_and_triton():
    allowed = {"torch", "triton", "unsoftmax"} | sys.stdlib_module_names
    for file in sorted((ROOT / "kernels").rglob("*.py")):
        foreign = {n for n in imported(file) if n.split(".")[0] not in allowed}
        assert not foreign, f"{file.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize(
    ("package", "file"), [("deepspeed", "train/engine.py"), ("lm_eval", "eval/harness.py")]
)
def test_a_heavy_dependency_is_imported_in_one_file(package, file):
    assert importers_of(package) in ([file], [])


def test_transformers_sees_no_kernels_package_of_ours_from_the_repository():
    assert not [f for f in ("kernels", "convert", "train", "eval") if (ROOT / f / "__init__.py").exists()]
    code = "from transformers.utils import is_kernels_available as f; print(f())"
    here, elsewhere = (
        subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True
        ).stdout
        for cwd in (ROOT, ROOT.anchor)
    )
    assert here == elsewhere


def test_no_file_is_a_drawer():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = (
        listed.stdout.split()
        if listed.returncode == 0
        else [str(f.relative_to(ROOT)) for f in source_files()]
    )
    names = {part.removesuffix(".py") for f in files for part in Path(f).parts}
    assert not names & DRAWERS


def test_the_package_links_to_each_folder():
    for folder in LEVEL:
        link = ROOT / "src" / "unsoftmax" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder, folder
