"""Read the project's own sources: which files there are, and how long their functions are.

For `test_architecture.py` only, which says what is allowed.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def project_files() -> list[Path]:
    """Return every file that git tracks or would, so that checks come before the commit."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout: only there is it known which files are the project's")
    names = [name for name in listing.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def python_files(*folders: str) -> list[Path]:
    """Return the Python files under the folders, of the whole project if none is named."""
    files = [path for path in project_files() if path.suffix == ".py"]
    return [path for path in files if not folders or name_of(path).split("/")[0] in folders]


def cpp_files() -> list[Path]:
    """Return the C++ and CUDA files."""
    return [path for path in project_files() if path.suffix in CPP_SUFFIXES]


def name_of(path: Path) -> str:
    """Return the path from the root of the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    """Parse a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.Module) -> Iterator[tuple[str, FunctionNode]]:
    """Yield every function with its dotted name, methods and nested functions too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.ClassDef, FunctionNode))
            name = f"{prefix}{child.name}" if named else prefix
            if isinstance(child, FunctionNode):
                yield name, child
            yield from walk(child, f"{name}." if named else prefix)

    return walk(tree, "")


def body_lines(function: FunctionNode) -> int:
    """Count the lines of a body, from its first statement behind the docstring to its end."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def positional_arguments(function: FunctionNode) -> int:
    """Count the arguments that may be passed by position, without self and cls."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def imported_modules(tree: ast.Module, path: Path) -> set[str]:
    """Return the modules that a file imports, at any depth, as dotted names."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                package = name_of(path).removesuffix(".py").split("/")[: -node.level]
                origin = ".".join([*package, *([origin] if origin else [])])
            # `from a import b` may name a module or something in one.
            modules |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return modules


def without_comments(source: str) -> str:
    """Blank out comments, strings and preprocessor lines of C++, keeping the line numbers."""
    pattern = (
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:\\\n|[^\n])*'
    )
    return re.sub(
        pattern, lambda m: "\n" * m.group().count("\n"), source, flags=re.DOTALL | re.MULTILINE
    )


def cpp_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield the head of every C++ function and its number of lines, braces included."""
    text = without_comments(source)
    depth, start, head_start, head = 0, 0, 0, ""
    for match in re.finditer(r"[{};]", text):
        place = match.start()
        if depth == 0 and match.group() == "{":
            head = text[head_start:place].strip()
            # Namespaces, classes and linkage blocks are looked into; so is what they hold.
            if re.match(r"(inline )?namespace|extern\b", head) or re.match(
                r"(template\s*<[^{]*>\s*)?(struct|class|union)\b[^()]*$", head
            ):
                head_start = place + 1
                continue
            depth, start = 1, place
        elif match.group() == "{":
            depth += 1
        elif match.group() == "}" and depth:
            depth -= 1
            if depth == 0 and ")" in head:
                yield " ".join(head.split()), text.count("\n", start, place) + 1
        if depth == 0:
            head_start = place + 1
