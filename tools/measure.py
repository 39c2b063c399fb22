"""`make measure`: the size of the package and how its parts are named, as plain text.

`python tools/measure.py [TREE]` measures a checkout, by default this one. It only reads files, so that trees of any age
can be compared. With `--beside PACKAGE...`, the packages of other projects, it also counts the words that none of them
uses; `--words` lists them.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_ENTRIES, MAX_FILE, MAX_FUNCTION, SMALL_MODULE, MAX_TEST_NAME = 15, 400, 60, 60, 60
MANY_ALLOWED = ("corral", "corral/cli", "corral/algos")
"""Folders that may have more entries: rooms, commands, algorithms."""
TWICE_ALLOWED = ("Config",)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class PythonFile:
    """A file of the tree, parsed."""

    def __init__(self, tree: Path, path: Path):
        self.path = path.relative_to(tree).as_posix()
        text = path.read_text()
        self.lines = text.count("\n")
        self.nodes = list(ast.walk(ast.parse(text)))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package(self) -> bool:
        return self.path.endswith(("__init__.py", "__main__.py"))

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


def python_files(tree: Path, *folders: str) -> list[PythonFile]:
    """Every Python file below these folders that exist."""
    return [PythonFile(tree, path) for folder in folders for path in sorted((tree / folder).rglob("*.py"))]


def show(title: str, value: object, details: Iterable[str] = ()) -> None:
    print(f"{title:<66} {value}")
    for detail in filter(None, details):
        print(f"    {detail}")


def sizes(files: list[PythonFile]) -> None:
    lines = [file.lines for file in files]
    largest = max(files, key=lambda file: file.lines)
    show("Python in the wheel: files", len(files))
    show("Python in the wheel: lines", f"{sum(lines):,}")
    show("median file, lines", f"{statistics.median(lines):g}")
    show("largest file, lines", f"{largest.lines} ({largest.path})")
    over = [f"{file.path}: {file.lines}" for file in files if file.lines > MAX_FILE]
    show(f"files over {MAX_FILE} lines", len(over), over)
    long = [
        f"{file.path}:{node.lineno} {node.name}: {length}"
        for file in files
        for node in file.functions()
        if (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION
    ]
    show(f"functions over {MAX_FUNCTION} lines", len(long), long)


def folders(tree: Path) -> None:
    """Entries are files and folders, `__init__.py` included."""
    counts = {}
    for folder in [tree / "corral", *sorted((tree / "corral").rglob("*/"))]:
        if folder.is_dir() and "__pycache__" not in folder.parts:
            counts[folder.relative_to(tree).as_posix()] = sum(
                not e.name.startswith(("__pycache__", ".")) for e in folder.iterdir()
            )
    largest = max(counts, key=lambda name: counts[name])
    show("entries of the largest folder", f"{counts[largest]} ({largest})")
    over = [
        f"{name}: {count}" + (" (allowed)" if name in MANY_ALLOWED else "")
        for name, count in counts.items()
        if count > MAX_ENTRIES
    ]
    show(f"folders with over {MAX_ENTRIES} entries", len(over), over)


def importers(files: list[PythonFile]) -> None:
    """Imports inside functions count; packages' `__init__` do not."""
    names = {file.module for file in files}
    used: dict[str, set[str]] = {name: set() for name in names}
    for file in files:
        for target in imports(file, names):
            if target != file.module:
                used[target].add(file.module)
    modules = [file for file in files if not file.is_package]
    show(f"modules under {SMALL_MODULE} lines", sum(file.lines < SMALL_MODULE for file in modules))
    show("modules with one importer", sum(len(used[file.module]) == 1 for file in modules))


def imports(file: PythonFile, names: set[str]) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names or node.module in names:
                    yield inner if inner in names else node.module


class Settings:
    """Fields of `Experiment` and of every class named `...Config`; a field that holds such a class is a group."""

    def __init__(self, files: list[PythonFile]):
        self.fields: dict[tuple[str, str], list[tuple[str, set[str]]]] = {}
        for file in files:
            for node in file.classes():
                if node.name == "Experiment" or node.name.endswith("Config"):
                    self.fields[file.path, node.name] = [
                        (field.target.id, set(re.findall(r"\w+", ast.unparse(field.annotation))))
                        for field in node.body
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    ]
        self._groups = {name: (path, name) for path, name in self.fields if name != "Config"}

    def group(self, words: set[str]) -> tuple[str, str] | None:
        return next((self._groups[word] for word in words if word in self._groups), None)

    def leaves(self, key: tuple[str, str]) -> list[str]:
        names = []
        for field, words in self.fields[key]:
            group = self.group(words)
            names += [f"{field}.{inner}" for inner in self.leaves(group)] if group else [field]
        return [name for name in names if name not in ("algorithm", "factory")]  # another Config, and no setting

    def groups(self, key: tuple[str, str]) -> list[str]:
        return [field for field, words in self.fields[key] if self.group(words)]


def settings(files: list[PythonFile]) -> None:
    found = Settings([file for file in files if not file.path.startswith("corral/testing/")])
    once = sum(len(fields) - len(found.groups(key)) for key, fields in found.fields.items())
    show("settings: fields of all Configs and of Experiment, each once", once)
    run = next(key for key in found.fields if key[1] == "Experiment")
    algorithms = {key[0]: key for key in found.fields if key[1] == "Config"}
    ppo = next(key for path, key in algorithms.items() if path.endswith("algos/ppo.py"))
    own, algorithm = len(found.leaves(run)), len(found.leaves(ppo))
    groups = ", ".join([*found.groups(run), *found.groups(ppo)]) or "none"
    parts = f"Experiment with its groups: {own}; algorithm with its groups: {algorithm}; groups: {groups}"
    show("settings of PPO", own + algorithm, [parts])


def words_of(files: Iterable[PythonFile]) -> Counter[str]:
    """Words in the names of functions and classes, and how many names have each."""
    found: Counter[str] = Counter()
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.ClassDef | Function):
                found.update({word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", node.name)})
    return found


def names(files: list[PythonFile], beside: list[Path], list_words: bool) -> None:
    classes = Counter(node.name for file in files for node in file.classes())
    twice = sorted(name for name, count in classes.items() if count > 1 and name not in TWICE_ALLOWED)
    show(f"class names that occur twice, but {' and '.join(TWICE_ALLOWED)}", len(twice), [", ".join(twice)])
    words = words_of(files)
    show("distinct words in the names of functions and classes", len(words))
    if beside:
        theirs = words_of(file for tree in beside for file in python_files(tree, "."))
        own = sorted(words.keys() - theirs.keys(), key=lambda word: (-words[word], word))
        details = [" ".join(f"{word}:{words[word]}" for word in own)] if list_words else []
        show("words that none of the other projects uses", len(own), details)


def states(files: list[PythonFile]) -> None:
    """Abstract classes in the packages that save states of environments."""
    found = [
        node.name
        for file in files
        if "snapshot" in file.path
        for node in file.classes()
        if any(isinstance(base, ast.Name) and base.id in ("ABC", "Protocol") for base in node.bases)
    ]
    show("contracts for states of environments", len(found), [", ".join(found)])


def test_names(files: list[PythonFile]) -> None:
    found = [node.name for file in files for node in file.functions() if node.name.startswith("test_")]
    show("test functions", len(found))
    show("test names: median characters", f"{statistics.median(map(len, found)):g}")
    show(f"test names over {MAX_TEST_NAME} characters", sum(len(name) > MAX_TEST_NAME for name in found))


def main(tree: Path, beside: list[Path], list_words: bool) -> None:
    files = python_files(tree, "corral")
    sizes(files)
    folders(tree)
    importers(files)
    settings(files)
    names(files, beside, list_words)
    states(files)
    test_names(python_files(tree, "tests", "benchmarks/tests", "corral/testing"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--words", action="store_true")
    args = parser.parse_args()
    main(args.tree.resolve(), [path.resolve() for path in args.beside], args.words)
