"""The catalogue of deliberate defects, of which each must still find its place."""

from __future__ import annotations

from defects.catalogue import DEFECTS
from support.documents import ROOT


def test_what_a_defect_replaces_stands_once_in_its_file() -> None:
    counts = {defect: (ROOT / defect.file).read_text().count(defect.right) for defect in DEFECTS}
    assert not [(each.file, each.right) for each, count in counts.items() if count != 1]
