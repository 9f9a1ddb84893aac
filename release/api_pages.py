"""The reference of the API: pages of docs/api/, and the list of all names in docs/api.md.

``make api`` writes them anew from signatures and docstrings; nothing is imported.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "api.md"
FOLDER = ROOT / "docs" / "api"
BEGIN, END = "<!-- written by make api -->\n", "<!-- end of what make api writes -->\n"
#: The pages: file, title, modules.
PAGES = [
    ("groups", "Groups and collectives", ["gradring", "gradring.stats"]),
    (
        "tensorflow",
        "TensorFlow and Keras",
        [
            "gradring.tensorflow",
            "gradring.tensorflow.callbacks",
            "gradring.elastic",
            "gradring.tensorflow.elastic",
        ],
    ),
    ("update-rules", "Update rules", ["gradring.updates"]),
    ("errors", "Errors", ["gradring.errors"]),
    (
        "horovod",
        "Horovod's names",
        [
            "gradring.horovod.tensorflow",
            "gradring.horovod.tensorflow.elastic",
            "gradring.horovod.tensorflow.keras",
            "gradring.horovod.tensorflow.keras.callbacks",
            "gradring.horovod.tensorflow.keras.elastic",
            "gradring.horovod.tensorflow.data.compute_service",
        ],
    ),
    (
        "programs",
        "Notebooks, Ray, and tests",
        ["gradring.notebook", "gradring.ray", "gradring.testing"],
    ),
]
MODULES = {module: page for page, _, modules in PAGES for module in modules}
#: A longer signature has a line for each parameter.
COLUMNS = 88
STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
#: What a class does where it is called, besides methods with names.
SPECIAL = ("__call__",)
#: How callbacks begin that a program does not call itself.
CALLED_BY_KERAS = ("on_train_", "on_epoch_", "on_test_")
SECTIONS = {
    "parameters": "Arguments",
    "other parameters": "Arguments",
    "attributes": "Attributes",
    "raises": "Raises",
    "returns": "Returns",
    "yields": "Yields",
}


class Reference:
    """All public names, and where each is described."""

    def __init__(self) -> None:
        """Reads the sources."""
        logging.getLogger("griffe").setLevel(logging.CRITICAL)
        options: Any = {
            "returns_multiple_items": False,
            "returns_named_value": False,
            "warnings": False,
        }
        self._package: Any = griffe.load(
            "gradring",
            search_paths=[ROOT / "python"],
            resolve_aliases=True,
            docstring_parser="google",
            docstring_options=options,
            allow_inspection=False,
        )
        #: By the path of a definition, the public name under which it is described.
        self._described: dict[str, str] = {}
        self.names: dict[str, dict[str, Any]] = {}
        for module in MODULES:
            found = {name: self._found(module, name) for name in self._exported(module)}
            self.names[module] = found
            for name, one in found.items():
                # It is described where it is defined, if programs can import it from there.
                path = one.canonical_path
                own = path if path.rpartition(".")[0] in MODULES else f"{module}.{name}"
                self._described.setdefault(path, own)
        #: By the path of a name, or of a module, the examples in its docstring.
        self.examples: dict[str, str] = {}
        for module in MODULES:
            for path, one in ((module, self._at(module)), *self.entries(module)):
                if example := _example(one):
                    self.examples[path] = example

    def pages(self) -> dict[Path, str]:
        """The text of each generated page."""
        return {
            FOLDER / f"{page}.md": "\n".join(self._page(title, modules)) + "\n"
            for page, title, modules in PAGES
        }

    def without_example(self) -> list[str]:
        """Paths of what no example shows: neither its own, nor that of its class or module."""
        paths = {path: None for module in MODULES for path, _ in self.entries(module)}
        return [
            path
            for path in paths
            if path not in self.examples
            and not path.rpartition(".")[2].startswith(CALLED_BY_KERAS)
            and self._shown_by(path) is None
        ]

    def entries(self, module: str) -> Iterator[tuple[str, Any]]:
        """What is described at a module: names, and the members of classes."""
        for name, one in self.names[module].items():
            path = f"{module}.{name}"
            if one.is_module or self._described[one.canonical_path] != path:
                continue
            yield path, one
            if one.is_class:
                for member, each in _members_of(one):
                    # What is inherited from a public class is that class's.
                    of = self._described.get(each.parent.canonical_path, path)
                    yield f"{of}.{member}", each

    def _shown_by(self, path: str) -> str | None:
        """The class or module whose examples read a name from something, or define it."""
        above, _, name = path.rpartition(".")
        while above:
            if re.search(rf"(?:\.|\bdef ){name}\b", self.examples.get(above, "")):
                return above
            # What a module around that one shows by this name is something else.
            above = "" if above in MODULES else above.rpartition(".")[0]
        return None

    def index(self) -> str:
        """The list of all names for docs/api.md."""
        lines = []
        for page, title, modules in PAGES:
            lines += ["", f"## [{title}](api/{page}.md)", "", "| module | names |", "|---|---|"]
            for module in modules:
                names = ", ".join(self._link(module, name) for name in self.names[module])
                lines.append(f"| `{module}` | {names} |")
        return "\n".join([*lines, "", ""])

    def _link(self, module: str, name: str) -> str:
        one = self.names[module][name]
        if one.is_module and one.canonical_path not in MODULES:
            return f"`{name}`"
        path = self._described[one.canonical_path]
        page = MODULES[one.canonical_path if one.is_module else path.rpartition(".")[0]]
        return f"[`{name}`](api/{page}.md#{_anchor(one.canonical_path if one.is_module else path)})"

    def _at(self, path: str) -> Any:
        return self._package[path.partition(".")[2]] if "." in path else self._package

    def _exported(self, module: str) -> list[str]:
        """What `__all__` lists; without one, the public functions and classes defined there."""
        found = self._at(module)
        names: list[str] = []
        for node in ast.parse(found.filepath.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names += ast.literal_eval(node.value)
            elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
                of = ast.unparse(node.value).removesuffix(".__all__")
                names += self._exported(found.members[of].canonical_path)
        if not names:
            return [
                name
                for name, one in found.members.items()
                if not name.startswith("_")
                and not one.is_alias
                and (one.is_class or one.is_function)
            ]
        return sorted(names, key=str.lower)

    def _found(self, module: str, name: str) -> Any:
        members = self._at(module).members
        if name in members:
            one = members[name]
            if one.is_module and name in one.members:  # a file that has the name of its function
                one = one.members[name]
            return one.final_target if one.is_alias else one
        # It is imported when it is first used.
        inside = (each.members.get(name) for each in self._at(module).modules.values())
        return next(one for one in inside if one is not None and not one.is_alias)

    def _page(self, title: str, modules: list[str]) -> Iterator[str]:
        yield f"# {title}"
        yield ""
        yield "Written by `make api` from the sources. [All names](../api.md) has the list, and"
        yield "says what examples are given."
        for module in modules:
            yield from ["", f"## `{module}`", ""]
            said = self._at(module).docstring
            yield _marked(said.value.partition("\n\n")[0]).removesuffix(":") if said else ""
            yield from _shown(_example(self._at(module)))
            for name, one in self.names[module].items():
                if not one.is_module:
                    yield from self._entry(module, name, one)

    def _entry(self, module: str, name: str, one: Any) -> Iterator[str]:
        path = f"{module}.{name}"
        yield from ["", f"### `{path}`", ""]
        described = self._described[one.canonical_path]
        if described != path:
            page = MODULES[described.rpartition(".")[0]]
            yield f"As [`{described}`]({page}.md#{_anchor(described)})."
            return
        yield from _fenced(_declaration(path, one))
        yield from _described(one)
        yield from self._reference_to_example(path, one)
        if one.is_class:
            for member, each in _members_of(one):
                yield from ["", f"#### `{one.name}.{member}`", ""]
                yield from _fenced(_declaration(member, each))
                yield from _described(each)

    def _reference_to_example(self, path: str, one: Any) -> Iterator[str]:
        """Where another's example shows it."""
        shown_by = None if _example(one) else self._shown_by(path)
        if shown_by is not None:
            yield from ["", f"Example: at [`{shown_by}`](#{_anchor(shown_by)})."]


def _members_of(of: Any) -> Iterator[tuple[str, Any]]:
    """The public members of a class that are described, inherited ones first."""
    inherited = {} if _is_error(of) else of.inherited_members
    for name, one in {**inherited, **of.members}.items():
        one = one.final_target if one.is_alias else one
        has_name = not name.startswith("_") or name in SPECIAL
        if has_name and one.has_docstring and not one.is_class:
            yield name, one


def _example(one: Any) -> str:
    """The examples of a docstring, as a session of Python; of a class, also those of its making."""
    made = one.members.get("__init__") if one.is_class else None
    return "\n\n".join(
        text
        for documented in (one, made)
        if documented is not None and documented.has_docstring and not documented.is_alias
        for section in _sections(documented)
        if section.kind.value == "examples"
        for _, text in section.value
    )


def _sections(documented: Any) -> Any:
    """The parts of a docstring."""
    docstring = documented.docstring
    # No type comes first there, so the first colon of the text has no meaning.
    docstring.value = re.sub(
        r"^((?:Returns|Yields):\n +)(?! |: )", r"\1: ", docstring.value, flags=re.MULTILINE
    )
    return docstring.parsed


def _shown(example: str) -> Iterator[str]:
    """An example on a page."""
    yield from ["", "**Example**", "", "```pycon", *example.splitlines(), "```"] if example else []


def _declaration(path: str, one: Any) -> list[str]:
    """The lines that say how something is called, or what it is."""
    if one.is_function:
        if "property" in one.labels:
            return [f"{path}: {one.returns}"]
        return [_signature(path, each, each.returns) for each in one.overloads or [one]]
    if one.is_class:
        if _is_typed_dict(one):
            fields = [f"    {name}: {each.annotation}" for name, each in one.attributes.items()]
            return [f"class {path}({', '.join(map(str, one.bases))}):", *fields]
        if _is_error(one):
            return [f"class {path}({', '.join(map(str, one.bases))})"]
        made = one.all_members.get("__init__")
        fields = [
            f"    {name}: {each.annotation}"
            for name, each in {**one.inherited_members, **one.members}.items()
            if each.is_attribute
            and not name.startswith("_")
            and each.annotation is not None
            and "property" not in each.labels
            and not _is_dataclass(one)
        ]
        is_called = made is not None and _is_called(one, made)
        head = _signature(f"class {path}", made, None) if is_called else f"class {path}"
        return [head + (":" if fields else ""), *fields]
    if "property" in one.labels:
        return [f"{path}: {one.annotation}"]
    kind = f": {one.annotation}" if one.annotation is not None else ""
    return [f"{path}{kind} = {one.value}" if one.value is not None else f"{path}{kind}"]


def _signature(path: str, function: Any, returns: object) -> str:
    """A call, on one line or with a line for each parameter."""
    written, kinds = [], griffe.ParameterKind
    before = None
    for each in parameters(function):
        if before is None and each.name in ("self", "cls"):
            continue
        if each.kind is kinds.keyword_only and before not in (
            kinds.keyword_only,
            kinds.var_positional,
        ):
            written.append("*")
        if before is kinds.positional_only and each.kind is not kinds.positional_only:
            written.append("/")
        before = each.kind
        stars = STARS.get(each.kind, "")
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        equals = " = " if annotation else "="
        has_default = each.default is not None and not stars
        default = f"{equals}{_value(function, each.default)}" if has_default else ""
        written.append(f"{stars}{each.name}{annotation}{default}")
    end = f" -> {returns}" if returns is not None else ""
    line = f"{path}({', '.join(written)}){end}"
    if len(line) <= COLUMNS:
        return line
    return "\n".join([f"{path}(", *(f"    {each}," for each in written), f"){end}"])


def parameters(function: Any) -> Iterator[Any]:
    """The parameters of a call; those of a `TypedDict` by name, in place of ``**settings``."""
    by_name: Any = griffe.ParameterKind.keyword_only
    for each in function.parameters:
        if not str(each.annotation).startswith("Unpack["):
            yield each
            continue
        fields = function.modules_collection[each.annotation.slice.canonical_path]
        for name, field in fields.attributes.items():
            yield griffe.Parameter(name, annotation=field.annotation, kind=by_name, default="None")


def _value(function: Any, default: Any) -> Any:
    """A default; of a constant that is not public, which is in capitals, what it is set to."""
    if not str(default).rpartition(".")[2].isupper():
        return default
    return function.modules_collection[default.canonical_path].value


def _described(one: Any) -> Iterator[str]:
    """The docstring, and for a class that of its `__init__`; examples come last."""
    made = one.members.get("__init__") if one.is_class else None
    stars = {each.name: STARS.get(each.kind, "") for each in getattr(one, "parameters", ())}
    for documented in (one, made):
        if documented is None or not documented.has_docstring or documented.is_alias:
            continue
        for section in _sections(documented):
            kind = section.kind.value
            if kind == "text":
                # That of an `__init__` only says that it makes the thing.
                text = section.value if documented is one else ""
                yield from ["", _marked(text)] if text else []
            elif kind in SECTIONS:
                yield from ["", f"**{section.title or SECTIONS[kind]}**", ""]
                yield from _items(kind, section.value, stars)
            elif kind == "admonition":
                said = section.value
                yield from ["", f"**{section.title or said.kind}**", "", _marked(said.contents)]
    yield from _shown(_example(one))


def _items(kind: str, values: Any, stars: dict[str, str]) -> Iterator[str]:
    for each in values:
        text = _marked(each.description).replace("\n", "\n  ")
        if kind == "raises":
            yield f"* `{each.annotation}`: {text}"
        elif kind in ("returns", "yields"):
            yield _marked(each.description)
        else:
            name = each.name.lstrip("*")
            yield f"* `{stars.get(name, '')}{name}`: {text}"


def _marked(text: str) -> str:
    """A docstring's text as Markdown: blocks after two colons become fenced."""
    lines: list[str] = []
    fenced = False
    source = text.strip("\n").splitlines()
    for at, line in enumerate(source):
        if not fenced and line.startswith("    ") and at > 1 and lines[-2].endswith("::"):
            if lines[-2] == "::":
                del lines[-2:]
            else:
                lines[-2] = lines[-2][:-1]
            lines.append("```python")
            fenced = True
        if fenced and line and not line.startswith("    "):
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
            fenced = False
        if fenced:
            lines.append(line.removeprefix("    "))
        else:
            lines.append(re.sub(r"\bdocs/([\w-]+)\.md", _link_to_page, line))
    text = "\n".join([*lines, "```"] if fenced else lines)
    return re.sub("(?<!`)``(?!`)", "`", text)


def _link_to_page(path: re.Match[str]) -> str:
    return f"[{path[1].replace('-', ' ')}](../{path[1]}.md)"


def _fenced(lines: list[str]) -> Iterator[str]:
    quoted = (re.sub(r"'([^'\"]*)'", r'"\1"', line) for line in lines)
    yield from ["```python", *quoted, "```"]


def _anchor(path: str) -> str:
    """That of a heading that is this name, here and on GitHub."""
    return path.replace(".", "").lower()


def _is_typed_dict(one: Any) -> bool:
    return any("TypedDict" in str(base) or _is_typed_dict(base) for base in _ancestors(one))


def _is_error(one: Any) -> bool:
    return any(str(base).endswith(("Exception", "Error")) for base in one.bases)


def _is_dataclass(one: Any) -> bool:
    return "dataclass" in one.labels


def _is_called(one: Any, made: Any) -> bool:
    """Whether programs make such a thing themselves: then something says what that takes."""
    said = {section.kind.value for section in _sections(one)}
    return made.has_docstring or _is_dataclass(one) or "parameters" in said


def _ancestors(one: Any) -> list[Any]:
    return [*getattr(one, "bases", []), *getattr(one, "resolved_bases", [])]


def written_into(page: str, part: str) -> str:
    """The page with the part between the comments that enclose it."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{part}{END}{rest.partition(END)[2]}"


def files() -> dict[Path, str]:
    """What each file should have in it."""
    reference = Reference()
    return {**reference.pages(), INDEX: written_into(INDEX.read_text(), reference.index())}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
