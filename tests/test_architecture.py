"""The shape of the project: who may import whom, how long things get, what is never written.

Every limit is of the house style. An exception is listed at the top, with its reason, and must
still be one.
"""

import ast
import json
import subprocess
import sys

import pytest

from tests.source_tree import (
    CPP_SUFFIXES,
    ROOT,
    body_lines,
    cpp_files,
    cpp_functions,
    functions,
    imported_modules,
    name_of,
    parse,
    positional_arguments,
    project_files,
    python_files,
)

# A room may import rooms of lower numbers, and itself.
ROOMS = {
    "errors": 0,
    "_versions": 1,
    "ranks": 1,
    "format": 2,
    "kernels": 3,
    "tensor": 4,
    "fsdp": 5,
    "checkpoint": 5,
    "nn": 5,
    "integrations": 6,
    "bench": 7,
    "cli": 8,
}
MAX_PYTHON_FILE, MAX_PYTHON_BODY = 300, 50
MAX_CPP_FILE, MAX_CPP_FUNCTION = 400, 100
MAX_POSITIONAL = 5
# "path:function" -> why its positional arguments are more.
LONG_SIGNATURES: dict[str, str] = {}
SOURCE_SUFFIXES = {*CPP_SUFFIXES, ".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml"}
BANNED_NAMES = {"utils", "common", "base"}
# Two levels of NF4, as digits and as bits: whoever has them has a table of their own.
DISTINCTIVE = ("0.6961928", "0.1609302", "3239b1", "3e24cae3")
CODEBOOKS = ("nf4tensor/format/", "csrc/common/codebook.h", "docs/files.md", "tests/")
HEAVY = (
    "transformers",
    "peft",
    "triton",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
)


def room_of(module: str) -> str | None:
    """Return the room of a dotted name or path; None outside of all rooms."""
    parts = module.removesuffix(".py").replace("/", ".").split(".")
    return parts[1] if parts[0] == "nf4tensor" and len(parts) > 1 else None


def test_imports_follow_the_arrow():
    against = []
    for path in python_files("nf4tensor"):
        room = room_of(name_of(path))
        if room in ("__init__", "__main__"):
            continue
        assert room in ROOMS, f"{name_of(path)} is in no room"
        for module in sorted(imported_modules(parse(path), path)):
            other = room_of(module)
            if other in ROOMS and other != room and ROOMS[other] >= ROOMS[room]:
                against.append(f"{name_of(path)} imports {module}")
    assert not against


def test_nothing_inside_imports_the_public_names():
    offenders = []
    for path in python_files("nf4tensor"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "nf4tensor" and not node.level:
                names = {alias.name for alias in node.names} - set(ROOMS)
                if names and name_of(path) != "nf4tensor/__main__.py":
                    offenders.append(f"{name_of(path)} imports {sorted(names)} from the package")
    assert not offenders


def test_format_and_errors_know_no_torch():
    for path in python_files("nf4tensor"):
        if room_of(name_of(path)) in ("format", "errors"):
            imported = {module.split(".")[0] for module in imported_modules(parse(path), path)}
            assert imported <= {"nf4tensor", *sys.stdlib_module_names}, name_of(path)


def test_tests_stay_out_of_the_package():
    for path in python_files("nf4tensor"):
        imported = {module.split(".")[0] for module in imported_modules(parse(path), path)}
        assert not imported & {"tests", "examples", "benchmarks", "pytest", "hypothesis"}


def test_import_is_light():
    """Each module is only a finding if plain `import torch` does not load it."""

    def loaded_by(module: str) -> set[str]:
        code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return set(json.loads(run.stdout.splitlines()[-1]))

    own = loaded_by("nf4tensor") - loaded_by("torch")
    heavy = [m for m in own if any(m == name or m.startswith(f"{name}.") for name in HEAVY)]
    assert not heavy, sorted(heavy)[:20]


def test_there_is_no_third_copy_of_the_codebook():
    copies = []
    for path in project_files():
        if path.suffix in {*CPP_SUFFIXES, ".py", ".in"} and not name_of(path).startswith(CODEBOOKS):
            text = path.read_text(encoding="utf-8").lower()
            copies += [f"{name_of(path)} has {level}" for level in DISTINCTIVE if level in text]
    assert not copies


def test_python_files_are_short():
    lengths = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in python_files()}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_PYTHON_FILE}


def test_python_functions_are_short():
    too_long = {}
    for path in python_files():
        for name, function in functions(parse(path)):
            if body_lines(function) > MAX_PYTHON_BODY:
                too_long[f"{name_of(path)}:{name}"] = body_lines(function)
    assert not too_long


def test_public_functions_take_few_positional_arguments():
    too_many = {}
    for path in python_files("nf4tensor"):
        for name, function in functions(parse(path)):
            is_private = any(
                part.startswith("_") and not part.startswith("__") for part in name.split(".")
            )
            if not is_private and positional_arguments(function) > MAX_POSITIONAL:
                too_many[f"{name_of(path)}:{name}"] = positional_arguments(function)
    assert set(too_many) == set(LONG_SIGNATURES), too_many


def test_cpp_files_and_functions_are_short():
    too_long = {}
    for path in cpp_files():
        source = path.read_text(encoding="utf-8")
        if source.count("\n") > MAX_CPP_FILE:
            too_long[name_of(path)] = source.count("\n")
        for head, lines in cpp_functions(source):
            if lines > MAX_CPP_FUNCTION:
                too_long[f"{name_of(path)}: {head[:80]}"] = lines
    assert not too_long


def test_cpp_functions_are_found_and_measured():
    source = """
        namespace { // a { that is not one
        template <int N> struct S { int n = 0; void f() const {
        } };
        int g(int a = 1) {  // "}"
          if (a) { return '}'; }
          return 0;
        }
        constexpr int table[] = {1, 2};
        }
    """
    assert [(head, lines) for head, lines in cpp_functions(source)] == [
        ("void f() const", 2),
        ("int g(int a = 1)", 4),
    ]


def test_no_file_has_a_name_that_says_nothing():
    files = {*python_files(), *cpp_files()}
    assert not [name_of(path) for path in files if path.stem.lower() in BANNED_NAMES]


def test_every_module_says_what_lives_in_it():
    silent = [name_of(path) for path in python_files() if not ast.get_docstring(parse(path))]
    assert not silent


def test_every_public_function_of_the_package_has_a_docstring():
    silent = []
    for path in python_files("nf4tensor"):
        tree = parse(path)
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and not ast.get_docstring(node):
                silent.append(f"{name_of(path)}:{node.name}")
    assert not silent


def test_sources_are_ascii():
    foreign = {}
    for path in project_files():
        if path.suffix in SOURCE_SUFFIXES or path.name in ("Makefile", "CMakeLists.txt"):
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                if not line.isascii():
                    foreign[f"{name_of(path)}:{number}"] = line.decode(errors="replace").strip()
    assert not foreign


@pytest.mark.parametrize("start", ["work", "home", "root", "tmp", "Users", "mnt"])
def test_no_path_of_some_machine_is_written_down(start):
    marks = [f"{before}/{start}/".encode() for before in (" ", '"', "'", "`", "=", "(", ":")]
    marks.append(b"../" + b"shared")
    found = []
    for path in project_files():
        content = path.read_bytes()
        if path != ROOT / "tests/test_architecture.py":
            found += [f"{name_of(path)} has {mark.decode()}" for mark in marks if mark in content]
    assert not found
