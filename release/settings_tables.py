"""Tables written from that of the settings: the one of the page, and the types in the stub.

``make settings`` writes both anew, between the comments that enclose them.
"""

from __future__ import annotations

from pathlib import Path

from gradring.bootstrap import init
from gradring.config.settings import READ, SETTINGS, Setting, unnamed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "command-line.md"
STUB = ROOT / "python" / "gradring" / "_native.pyi"
BEGIN, END = "settings: written by make settings", "end of settings"
#: The types of what Python reads, by what the table calls its kind.
TYPES = {
    "0 or 1": "bool",
    "PEM file": "Any",
    "`auto` or addresses": "tuple[str, ...]",
    "directory": "Path",
    "file": "Path",
    "from": "int",
    "level": "int",
    "name or IP": "str",
    "names": "str",
    "port": "int",
    "port or range": "tuple[int, int]",
    "seconds": "float",
    "secret": "bytes",
    "text": "str",
}


def markdown() -> str:
    """The table for the page."""
    head = ["variable", "value", "default", "argument of `init()`", "meaning"]
    rows = [
        [
            f"`{setting.variable}`" + "*" * setting.agreed,
            _values(setting),
            _default(setting),
            f"`{setting.name}`" if setting.argument else "",
            setting.meaning,
        ]
        for setting in SETTINGS
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def _values(setting: Setting) -> str:
    if not setting.choices:
        return setting.kind
    if setting.kind == "from":
        return " to ".join(setting.choices)
    *first, last = (f"`{choice}`" for choice in setting.choices)
    return f"{', '.join(first)} or {last}"


def _default(setting: Setting) -> str:
    text = setting.default
    return text if not text or text.isdecimal() else f"`{text}`"


def types() -> str:
    """The types for the stub."""
    values = {name: _type(setting) for name, setting in READ.items()}
    optional = {name: f"{type_} | None" for name, type_ in values.items()}
    needed = {name: values[name] if READ[name].default else optional[name] for name in READ}
    return "\n".join(
        [
            "@type_check_only",
            "class Options(TypedDict, total=False):",
            *(f"    {setting.name}: {optional[setting.name]}" for setting in unnamed(init)),
            "",
            "@type_check_only",
            "class SettingValues:",
            "    __dataclass_fields__: ClassVar[dict[str, Any]]",
            "    def __init__(self, **values: Any) -> None: ...",
            *(f"    {name}: {type_}" for name, type_ in needed.items()),
            "",
        ]
    )


def _type(setting: Setting) -> str:
    if setting.kind == "one of":
        words = ", ".join(f'"{choice}"' for choice in setting.choices)
        return f"Literal[{words}]"
    return TYPES[setting.kind]


def written_into(text: str, table: str) -> str:
    """``text`` with ``table`` between the comments that enclose it."""
    lines = text.splitlines(keepends=True)
    begin, end = (next(i for i, line in enumerate(lines) if word in line) for word in (BEGIN, END))
    return "".join([*lines[: begin + 1], "\n", table, "\n", *lines[end:]])


if __name__ == "__main__":
    for file, table in ((PAGE, markdown()), (STUB, types())):
        file.write_text(written_into(file.read_text(), table))
