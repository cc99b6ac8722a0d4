"""Tidiness is a unit test: bounds on functions, files and parameters, read from the source alone.

The bounds are a little tighter than what a reader can hold at once. When one fails, the cure is a better cut, not a
higher bound.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("prefixcache", "offload", "clients", "proto", "benchmarks")
MAX_FUNCTION_LINES, P95_FUNCTION_LINES, MAX_COMPLEXITY, MAX_FILE_LINES, MAX_PARAMETERS = 60, 35, 12, 400, 6
BRANCHES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.With, ast.AsyncWith, ast.IfExp,
    ast.comprehension, ast.match_case,
)  # fmt: skip
# The two shells' top loops may catch everything: a bug in one call must not end the service for all others.
BROAD_EXCEPT_ALLOWED = {
    "prefixcache/server/loop.py",
    "prefixcache/server/grpc_server.py",
    "prefixcache/server/local_channel.py",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    """Every hand-written Python file that ships."""
    found = [p for root in SOURCES for p in (ROOT / root).rglob("*.py")]
    return sorted(p for p in found if "v1" not in p.relative_to(ROOT).parts)


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """Each function of a file with the name to report."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def length(function: Function) -> int:
    """Lines from `def` to the end."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def complexity(function: Function) -> int:
    """One, and one more for each branch and each further operand of `and`/`or`."""
    nodes = list(ast.walk(function))
    branches = sum(isinstance(n, BRANCHES) for n in nodes)
    return 1 + branches + sum(len(n.values) - 1 for n in nodes if isinstance(n, ast.BoolOp))


def parameters(function: Function) -> int:
    """Parameters a caller must think of; keyword-only ones with a default do not count."""
    arguments = function.args
    names = [a.arg for a in [*arguments.posonlyargs, *arguments.args] if a.arg not in {"self", "cls"}]
    return len(names) + sum(default is None for default in arguments.kw_defaults)


ALL = [(name, f) for path in sources() for name, f in functions(path)]


def test_functions_are_short() -> None:
    long = [f"{name}: {length(f)} lines" for name, f in ALL if length(f) > MAX_FUNCTION_LINES]
    assert not long, "\n".join(long)
    lengths = sorted(length(f) for _, f in ALL)
    assert lengths[int(0.95 * (len(lengths) - 1))] <= P95_FUNCTION_LINES


def test_functions_are_simple() -> None:
    knotty = [f"{name}: {complexity(f)}" for name, f in ALL if complexity(f) > MAX_COMPLEXITY]
    assert not knotty, "\n".join(knotty)


def test_functions_take_few_parameters() -> None:
    wide = [f"{name}: {parameters(f)}" for name, f in ALL if parameters(f) > MAX_PARAMETERS]
    assert not wide, "\n".join(wide)


def test_bool_parameters_are_keyword_only() -> None:
    bare = []
    for name, function in ALL:
        arguments = [*function.args.posonlyargs, *function.args.args]
        bare += [f"{name}({a.arg})" for a in arguments if a.annotation and ast.unparse(a.annotation) == "bool"]
    assert not bare, "\n".join(bare)


def test_files_are_short_and_begin_with_their_rules() -> None:
    long = [f"{p.relative_to(ROOT)}: {n} lines" for p in sources() if (n := p.read_text().count("\n")) > MAX_FILE_LINES]
    assert not long, "\n".join(long)
    mute = [str(p.relative_to(ROOT)) for p in sources() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not mute, f"no docstring: {mute}"


def test_no_broad_except_outside_the_top_loops() -> None:
    broad = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            caught = getattr(node.type, "id", None) if isinstance(node, ast.ExceptHandler) and node.type else None
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            allowed = str(path.relative_to(ROOT)) in BROAD_EXCEPT_ALLOWED
            if (bare or caught in {"Exception", "BaseException"}) and not allowed:
                broad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not broad, "\n".join(broad)


def test_no_unfinished_marks() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError|type: ignore(?!\[)")
    lines = [(p, i, line) for p in sources() for i, line in enumerate(p.read_text().splitlines(), 1)]
    found = [f"{p.relative_to(ROOT)}:{i}" for p, i, line in lines if marks.search(line)]
    assert not found, "\n".join(found)


def test_tests_do_not_sleep() -> None:
    """Only a function that polls a condition until a deadline may sleep; its name says so."""
    sleepy = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name, function in functions(path):
            calls = [ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)]
            if "time.sleep" in calls and not re.match(r"_?(wait|poll|eventually)", function.name):
                sleepy.append(name)
    assert not sleepy, "wait on a condition with a deadline instead:\n" + "\n".join(sleepy)


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE"])
def test_documents_exist(name: str) -> None:
    assert (ROOT / name).stat().st_size > 200


def test_architecture_names_every_source_file() -> None:
    """The table file -> role in ARCHITECTURE.md may not fall behind the tree."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [str(p.relative_to(ROOT)) for p in sources() if p.name != "__init__.py" and f"`{p.name}`" not in text]
    assert not missing, f"ARCHITECTURE.md says nothing of {missing}"
