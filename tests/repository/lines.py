"""Lines of the product by folder, without tests, comments, docstrings and blank lines.

``make lines`` prints them; ``python tests/repository/lines.py DIRECTORY`` prints those of another
checkout.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

from import_graph import rust_product

ROOT = Path(__file__).parents[2]
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def rust_lines(source: Path) -> Counter[str]:
    """By module at the top of a crate."""
    found: Counter[str] = Counter()
    for module, text in rust_product(source).items():
        found[module.partition(".")[0]] += sum(bool(line.strip()) for line in text.splitlines())
    return found


def python_lines(package: Path) -> Counter[str]:
    """By module or folder at the top of a package."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py*"):
        if path.suffix in (".py", ".pyi"):
            top = path.relative_to(package).parts[0]
            found[top.partition(".")[0]] += _code(path)
    return found


def _code(path: Path) -> int:
    with path.open("rb") as text:
        tokens = [it for it in tokenize.tokenize(text.readline) if it.type not in _NOT_CODE]
    lines = {line for it in tokens for line in range(it.start[0], it.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(end)):
                lines -= set(range(node.lineno, end + 1))
    return len(lines)


def product_lines(root: Path) -> dict[str, int]:
    """By folder of a checkout."""
    package = python_lines(root / "python" / "gradring")
    crates = sorted(it.parent for it in root.glob("rust/*/Cargo.toml") if _is_in_the_wheel(it))
    return {
        **{
            f"{crate.relative_to(root).as_posix()}/src/{name}": count
            for crate in crates
            for name, count in sorted(rust_lines(crate / "src").items())
        },
        **{f"python/gradring/{name}": count for name, count in sorted(package.items())},
        "benches": python_lines(root / "benches").total(),
    }


def _is_in_the_wheel(manifest: Path) -> bool:
    return "not in the wheel" not in manifest.read_text()


def main() -> None:
    """Prints a table whose last row is the sum."""
    rows = product_lines(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
    for name, count in {**rows, "all": sum(rows.values())}.items():
        print(f"{count:7,}  {name}")


if __name__ == "__main__":
    main()
