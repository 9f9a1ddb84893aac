"""The counter of product lines."""

from pathlib import Path

from lines import product_lines

FILES = {
    "rust/core/Cargo.toml": "",
    "rust/core/src/lib.rs": "//! A crate.\nmod deep;\n\n#[cfg(test)]\nmod tests;\n",
    "rust/core/src/tests.rs": "fn test() {}\n",
    "rust/core/src/deep.rs": 'mod part;\nconst A: &str = "\n// text }";\n',
    "rust/core/src/deep/part.rs": "/* A\ncomment. */\nconst B: u8 = 1; // One.\n"
    "#[cfg(test)]\nmod tests {\n    fn test() {}\n}\n",
    "rust/other/Cargo.toml": "",
    "rust/other/src/lib.rs": "const C: char = '{';\n",
    "rust/other/src/helpers/mod.rs": "#![cfg(test)]\nmod part;\n",
    "rust/other/src/helpers/part.rs": "fn help() {}\n",
    "rust/other/tests/group.rs": "fn test() {}\n",
    "python/gradring/errors.py": '"""Errors."""\n\nA = (\n    1,\n\n    2,  # Two.\n)\n',
    "python/gradring/deep/a.py": 'def a():\n    """A.\n\n    B.\n    """\n    return """\n\n"""\n',
    "python/gradring/deep/b.pyi": "# A comment.\nB: int\n",
    "benches/bench.py": "C = 1\n",
}


def test_tests_comments_docstrings_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert product_lines(tmp_path) == {
        "rust/core/src/deep": 4,
        "rust/core/src/lib": 1,
        "rust/other/src/lib": 1,
        "python/gradring/deep": 5,
        "python/gradring/errors": 4,
        "benches": 1,
    }
