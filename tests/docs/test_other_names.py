"""The table of other libraries' names: ours exist, with these arguments, and none is forgotten."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradring
import gradring.tensorflow
from gradring import _native
from support.documents import ROOT

PAGE = ROOT / "docs" / "other-names.md"
SECTION = "The names"
#: What the table calls the handle of an asynchronous collective, and the whole package.
ROOTS: dict[str, Any] = {"work": gradring.Work, "gradring": gradring}
OBJECTS = {"broadcast_object", "all_gather_object"}


@pytest.fixture(scope="module")
def comm() -> Iterator[gradring.Communicator]:
    with gradring.Communicator(0, 1) as alone:
        yield alone


def rows() -> list[list[str]]:
    """The cells of the table, but for its head."""
    text = PAGE.read_text().partition(f"## {SECTION}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def expressions(cell: str) -> list[ast.expr]:
    """What stands in backquotes; of an assignment, its right side."""
    found = []
    for code in re.findall(r"`([^`]+)`", cell):
        statement = ast.parse(code).body[0]
        assert isinstance(statement, ast.Expr | ast.Assign), code
        found.append(statement.value)
    return found


def called(node: ast.expr) -> tuple[ast.expr, ast.Call | None]:
    return (node.func, node) if isinstance(node, ast.Call) else (node, None)


def looked_up(name: ast.expr, roots: dict[str, Any], functions: Any) -> Any:
    """What a name of a table stands for; a bare one is that of a function."""
    if isinstance(name, ast.Attribute):
        assert isinstance(name.value, ast.Name), ast.unparse(name)
        return getattr(roots[name.value.id], name.attr)
    assert isinstance(name, ast.Name), ast.unparse(name)
    return getattr(functions, name.id)


def check_call(function: Callable[..., Any], call: ast.Call) -> None:
    """Raises TypeError if it takes no such arguments, ValueError if there is no such op."""
    values = list(call.args)
    if inspect.isfunction(function) and "self" in inspect.signature(function).parameters:
        values.insert(0, call.func)
    named = {keyword.arg or "": keyword.value for keyword in call.keywords}
    bound = inspect.signature(function).bind(*values, **named)
    check_op(bound.arguments.get("op"))


def check_op(node: ast.expr | None) -> None:
    """Raises ValueError if it is the name of no op."""
    if isinstance(node, ast.Constant):
        _native.Collective.all_reduce(str(node.value))


def test_every_name_and_argument_exists(comm: gradring.Communicator) -> None:
    roots = {**ROOTS, "comm": comm}
    table = rows()
    assert len(table) > 20
    for *_, arrays, tensors in table:
        for node in [*expressions(arrays), *expressions(tensors)]:
            name, call = called(node)
            if isinstance(node, ast.Constant):
                check_op(node)
                continue
            found = looked_up(name, roots, gradring.tensorflow)
            if call is not None:
                check_call(found, call)


def test_no_collective_and_no_reduce_op_is_forgotten() -> None:
    of_communicator = dir(gradring.Communicator)
    twins = {name for name in of_communicator if f"{name}_async" in of_communicator}
    assert len(twins) > 7
    table = rows()
    text = " ".join(arrays for *_, arrays, _ in table)
    missing = {name for name in twins | OBJECTS | {"split"} if f"comm.{name}(" not in text}
    assert not missing
    of_tensors = " ".join(tensors for *_, tensors in table)
    functions = twins.intersection(gradring.tensorflow.__all__)
    assert not {name for name in functions if not re.search(rf"\b{name}\(", of_tensors)}
    for op in ("sum", "mean", "min", "max", "product"):
        assert f'`"{op}"`' in text


def test_what_does_not_exist_is_found_out(comm: gradring.Communicator) -> None:
    roots = {**ROOTS, "comm": comm}
    for code, error in {
        "comm.allreduce(x)": AttributeError,
        "comm.reduce(x, dst=0)": TypeError,
        "comm.reduce(x, 'sum', 0, y)": TypeError,
        "work.wait(5.0, 1)": TypeError,
        "gradring.init(timeouts=1)": TypeError,
        "comm.all_reduce(x, op='avg')": ValueError,
        "all_reduce_async(x)": AttributeError,
        "all_gather(x, out=y)": TypeError,
    }.items():
        (node,) = expressions(f"`{code}`")
        name, call = called(node)
        assert call is not None
        with pytest.raises(error):
            check_call(looked_up(name, roots, gradring.tensorflow), call)
