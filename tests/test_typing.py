"""The types that strata_ops ships. Whether they fit its code and a user's program (typed_use.py), `make style` says."""

import ast
import re
from pathlib import Path

import strata_ops
from strata_ops import _core

PACKAGE = Path(strata_ops.__file__).parent
STUB = ast.parse((PACKAGE / "_core.pyi").read_text()).body


def public(names):
    return {name for name in names if not name.startswith("_")}


def parameters(function: ast.FunctionDef) -> list[str]:
    """As pybind11 names them; positional ones have no name there."""
    positional = [f"arg{i}" for i in range(len(function.args.posonlyargs))]
    return positional + [a.arg for a in function.args.args]


def told_parameters(compiled) -> list[str]:
    signature = compiled.__doc__.splitlines()[0].partition(") ->")[0]
    return re.findall(r"(\w+): ", signature)


def test_the_stub_has_every_name():
    names = {node.name for node in STUB if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names |= {node.target.id for node in STUB if isinstance(node, ast.AnnAssign)}
    assert names == public(dir(_core))
    for node in STUB:
        if isinstance(node, ast.ClassDef):
            members = public(member.name for member in node.body if isinstance(member, ast.FunctionDef))
            assert members == public(vars(getattr(_core, node.name))), node.name


def test_the_stub_has_the_parameters():
    compared = 0
    for node in STUB:
        place = getattr(_core, node.name) if isinstance(node, ast.ClassDef) else _core
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef) and not function.decorator_list:
                assert parameters(function) == told_parameters(getattr(place, function.name)), function.name
                compared += 1
    assert compared > 20


def test_the_stub_has_the_constants_types():
    types = {"int": int, "str": str}
    for node in STUB:
        if isinstance(node, ast.AnnAssign):
            text = ast.unparse(node.annotation).removeprefix("Final[").removesuffix("]")
            assert isinstance(getattr(_core, node.target.id), types.get(text, tuple)), node.target.id


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()
