"""Records of trainings, kept in a file, so that another run goes on with the rest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from gradring.machine import resources
from real_models.grid import Cell
from real_models.run import Result
from real_models.training import Trained
from support.versions import KERAS, installed

DIRECTORY = Path(__file__).parent / "records"
"""Those of the page: one file for each version of TensorFlow."""


@dataclass
class Record:
    """Results of one machine and one set of versions.

    Attributes:
        environment: The machine, and the versions of the packages.
        days: On which trainings ran, in order.
        results: Those without a problem.
    """

    environment: dict[str, str]
    days: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record:
        """A file that `add` has written.

        Raises:
            OSError: It cannot be read.
        """
        found = json.loads(path.read_text())
        results = [
            Result(Cell(**each["cell"]), [Trained(**rank) for rank in each["ranks"]])
            for each in found["results"]
        ]
        return cls(found["environment"], found["days"], results)

    @classmethod
    def here(cls) -> Record:
        """What was trained with these versions on this machine; empty if nothing was.

        Raises:
            ValueError: The file of these versions is of another machine.
        """
        here = environment()
        record = cls(here)
        if not record.path.exists():
            return record
        record = cls.read(record.path)
        if record.environment != here:
            raise ValueError(f"{record.path} is of {record.environment}, and this is {here}")
        return record

    @property
    def path(self) -> Path:
        """Its file."""
        found = self.environment
        name = f"tensorflow-{found['tensorflow-cpu']}-keras-{found['keras']}.json"
        return DIRECTORY / name

    def add(self, result: Result) -> None:
        """Keeps one more result, unless it has a problem, and writes the file."""
        if result.problems:
            return
        self.results.append(result)
        self.days = sorted({*self.days, date.today().isoformat()})
        DIRECTORY.mkdir(exist_ok=True)
        lines = ",\n ".join(json.dumps(asdict(result)) for result in self.results)
        head = json.dumps({"environment": self.environment, "days": self.days})
        self.path.write_text(f'{head[:-1]}, "results": [\n {lines}\n]}}\n')


def environment() -> dict[str, str]:
    """This machine, and what the trainings depend on."""
    packages = {"tensorflow-cpu": ["tensorflow-cpu"], "keras": KERAS, "numpy": ["numpy"]}
    versions = {name: installed(names) for name, names in packages.items()}
    return {"machine": resources.machine(), **versions}
