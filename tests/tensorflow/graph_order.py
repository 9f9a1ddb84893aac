"""The order of operations in a graph."""

from typing import Any


def before(op: Any) -> set[str]:
    """Names of all ops that must run before `op`."""
    seen: set[str] = set()
    stack = [op]
    while stack:
        op = stack.pop()
        for earlier in (*op.control_inputs, *(tensor.op for tensor in op.inputs)):
            if earlier.name not in seen:
                seen.add(earlier.name)
                stack.append(earlier)
    return seen
