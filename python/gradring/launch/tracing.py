"""``gradring run --trace FILE``: merges the ranks' parts into one timeline."""

from __future__ import annotations

import shutil
from pathlib import Path

from gradring.errors import ConfigError
from gradring.records import paths


def merge(trace: Path, *, served: bool = False) -> str:
    """Writes the timeline of all ranks with a part; returns a sentence on the result.

    Args:
        trace: The timeline's file.
        served: True if the ranks are workers of parameter servers, which form no group.
    """
    from gradring.records import records, timeline

    parts = paths.parts_of(trace)
    try:
        groups = [records.read(directory) for directory in paths.directories(parts)]
        timeline.write(trace, *groups)
    except ConfigError as error:
        nothing = "no rank has left a part by close()"
        if served:
            nothing = "workers of parameter servers form no group, and so have no collectives"
        why = error if any(paths.written(parts)) else nothing
        return f"there is no timeline {trace}: {why}"
    except OSError as error:
        return f"the timeline {trace} cannot be written ({error.strerror}); {parts} holds its parts"
    shutil.rmtree(parts, ignore_errors=True)
    missing = sorted(
        {
            rank
            for found in groups
            for rank in set(range(found[0].world_size)) - {record.rank for record in found}
        }
    )
    without = f", without rank {', '.join(map(str, missing))}" if missing else ""
    return f"the timeline is {trace}{without}; open it at ui.perfetto.dev"
