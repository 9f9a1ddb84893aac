"""Runs of many programs: each in one process first, and where it is valid there, on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from program_fuzz import groups
from program_fuzz.features import Program
from program_fuzz.groups import Outcome, Setting
from program_fuzz.judge import judged
from program_fuzz.source import source_of

#: How many programs a process runs before another starts: memory grows with graphs.
AT_ONCE = 40


@dataclass
class Finding:
    """What became of a program: invalid in one process, different on ranks, or equal."""

    program: Program
    invalid: str = ""
    difference: str = ""
    ranks: int = 0


class Fuzz:
    """One run; its sources and results are in a directory."""

    def __init__(
        self, directory: Path, ranks: Sequence[int], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.directory, self.ranks, self.say = directory, ranks, say

    def run(self, programs: Mapping[int, Program]) -> list[Finding]:
        found: list[Finding] = []
        keys = list(programs)
        for begin in range(0, len(keys), AT_ONCE):
            chosen = {key: programs[key] for key in keys[begin : begin + AT_ONCE]}
            found += self._run_some(chosen).values()
        return found

    def _run_some(self, programs: Mapping[int, Program]) -> dict[int, Finding]:
        findings = {key: Finding(program) for key, program in programs.items()}
        alone = self._outcomes(Setting(0), programs)
        for key, outcome in alone.items():
            findings[key].invalid = outcome.error
            if outcome.error:
                self.say(f"seed {key} is invalid: {outcome.error[:300]}")
        for is_given in (True, False):
            for ranks in self.ranks:
                chosen = {
                    key: each.program
                    for key, each in findings.items()
                    if not each.invalid
                    and not each.difference
                    and (each.program["door"] == "given") == is_given
                }
                for key, outcome in self._outcomes(Setting(ranks, is_given), chosen).items():
                    finding = findings[key]
                    finding.difference = judged(finding.program, alone[key], outcome)
                    finding.ranks = ranks
                    if finding.difference:
                        self.say(f"seed {key} on {ranks} ranks: {finding.difference[:700]}")
        return findings

    def _outcomes(self, setting: Setting, programs: Mapping[int, Program]) -> dict[int, Outcome]:
        if not programs:
            return {}
        name = f"{'given' if setting.is_given else 'own'}-{setting.ranks}"
        sources = self.directory / "sources" / name
        sources.mkdir(parents=True, exist_ok=True)
        for key, program in programs.items():
            text = source_of(program, is_reference=not setting.ranks)
            (sources / f"{key}.py").write_text(text)
        return groups.run(setting, list(programs), sources, self.directory / "results" / name)
