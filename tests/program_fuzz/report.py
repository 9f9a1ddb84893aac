"""The report of a run: how many programs had which feature, what differed, what was invalid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from program_fuzz.features import FEATURES, has
from program_fuzz.runs import Finding
from program_fuzz.source import layers_of


def text_of(findings: Sequence[Finding]) -> str:
    valid = [each for each in findings if not each.invalid]
    failed = [each for each in valid if each.difference]
    invalid = len(findings) - len(valid)
    lines = [
        f"{len(findings)} programs: {len(valid) - len(failed)} equal, {len(failed)} differ, "
        f"{invalid} invalid"
    ]
    for name, counts in counted(valid).items():
        most = ", ".join(f"{value} {count}" for value, count in counts.most_common())
        lines.append(f"  {name}: {most}")
    lines += [f"differs: seed {e.program['seed']}, {e.ranks} ranks: {e.difference}" for e in failed]
    return "\n".join(lines)


def counted(findings: Sequence[Finding]) -> dict[str, Counter[str]]:
    """In how many programs each value of each feature was."""
    found: dict[str, Counter[str]] = {}
    for name in FEATURES:
        if name in ("first", "body", "loss", "metrics"):
            continue
        counts = found.setdefault(name, Counter())
        for each in findings:
            value = each.program[name]
            values = (
                value if isinstance(value, list) else [value] if has(each.program, name) else []
            )
            counts.update(str(value).partition("(RATE")[0] for value in values)
        counts["plain"] = sum(not has(each.program, name) for each in findings)
    layers = found.setdefault("layers", Counter())
    for each in findings:
        layers.update({layer.partition("(")[0] for layer in layers_of(each.program)[0]})
    return found
