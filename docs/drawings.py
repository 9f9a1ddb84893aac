"""The drawings of the pages, as SVG: `python docs/drawings.py` writes them into docs/images.

The states of an elastic job are those of docs/internals/elastic.md, from which each arrow comes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.sax.saxutils import escape

PAGES = Path(__file__).parent
IMAGES = PAGES / "images"
#: Text and lines change with the reader's colours; the fills, and the text on them, do not. The
#: fills are those of `gradring demo`: white can be read on blue only.
STYLE = """
text { font: 14px sans-serif; fill: #1d1d1f; }
.small { font-size: 12px; } .head { font-weight: bold; font-size: 16px; }
.light { fill: #fff; } .dark { fill: #1d1d1f; }
.line { stroke: #1d1d1f; fill: none; stroke-width: 1.6; } .tip { fill: #1d1d1f; }
.node { fill: #3b6ea5; } .compute { fill: #3b6ea5; } .moves { fill: #e08a3c; }
.waits { fill: #c6bfb2; } .ground { fill: #fff; }
@media (prefers-color-scheme: dark) {
  text:not(.light):not(.dark), .tip { fill: #e8e8ea; }
  .line { stroke: #e8e8ea; } .ground { fill: #1e2129; }
}
"""
TIP = (
    '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
    'orient="auto"><path class="tip" d="M0 0 L10 5 L0 10 z"/></marker>'
)
RADIUS = 24
Point = tuple[float, float]


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole SVG; ``title`` is read to those who do not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    )
    ground = f'<rect class="ground" width="{width}" height="{height}" rx="8"/>'
    style = f"<style>{STYLE}</style><defs>{TIP}</defs>"
    return "\n".join([head, f"<title>{escape(title)}</title>", style, ground, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words whose line stands at ``y``."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "") -> str:
    """A rectangle with words in its middle."""
    drawn = (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
    )
    shade = "light" if kind in ("compute", "node") else "dark"
    label = text(x + width / 2, y + height / 2 + 4, words, f"small {shade}", "middle")
    return drawn + (label if words else "")


def node(at: Point, words: str) -> str:
    """A circle with words in it."""
    circle = f'<circle class="node" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{RADIUS}"/>'
    return circle + text(round(at[0], 1), round(at[1], 1) + 5, words, "light", "middle")


def arrow(start: Point, end: Point, gap: float = RADIUS + 3, bend: float = 0) -> str:
    """A line between two nodes that ends before each, and leaves the straight one by ``bend``."""
    (x0, y0), (x1, y1) = start, end
    length = math.dist(start, end)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    mx, my = middle(start, end, 2 * bend)
    ends = f"M{x0 + ux * gap:.1f} {y0 + uy * gap:.1f} Q{mx:.1f} {my:.1f} "
    return (
        f'<path class="line" marker-end="url(#tip)" '
        f'd="{ends}{x1 - ux * gap:.1f} {y1 - uy * gap:.1f}"/>'
    )


def middle(start: Point, end: Point, bend: float) -> Point:
    """The middle between two points, ``bend`` beside it."""
    length = math.dist(start, end)
    nx, ny = -(end[1] - start[1]) / length, (end[0] - start[0]) / length
    return (start[0] + end[0]) / 2 + nx * bend, (start[1] + end[1]) / 2 + ny * bend


def ring_and_direct() -> str:
    """Who sends to whom, and what that costs."""
    ranks, parts = 4, []
    for left, name, said in (
        (0, "ring", ["chunks travel around:", "2 (N-1) steps, to one neighbour each"]),
        (330, "direct", ["each rank reduces one chunk", "and sends it to all: 2 steps"]),
    ):
        places = [
            (left + 165 + 90 * math.sin(turn), 150 - 90 * math.cos(turn))
            for turn in (math.tau * rank / ranks for rank in range(ranks))
        ]
        pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        if name == "direct":
            pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        bend = 6 if name == "direct" else 0
        parts += [text(left + 165, 30, name, "head", "middle")]
        parts += [arrow(places[a], places[b], bend=bend) for a, b in pairs]
        parts += [node(at, str(rank)) for rank, at in enumerate(places)]
        parts += [text(left + 165, 290 + 20 * n, it, "", "middle") for n, it in enumerate(said)]
    parts.append(
        text(330, 342, "Each rank sends 2 (N-1)/N n bytes of a buffer of n.", "", "middle")
    )
    return picture(660, 360, "Four ranks in a ring, and four that all send to each other", parts)


def step() -> str:
    """A training step of one rank, as TensorFlow and as gradring see it."""
    top, low, high = 70, 160, 38
    parts = [text(20, 34, "One training step of a rank", "head")]
    parts += [text(20, top + 24, "TensorFlow"), text(20, low + 24, "gradring")]
    for x, width, kind, words in (
        (120, 120, "compute", "forward"),
        (242, 90, "compute", "layer 3"),
        (334, 90, "compute", "layer 2"),
        (426, 90, "compute", "layer 1"),
        (518, 92, "waits", "Wait"),
        (612, 68, "compute", "apply"),
    ):
        parts.append(box(x, top, width, high, kind, words))
    parts.append(text(379, top - 10, "backward", "small", "middle"))
    for x, width, kind, words in (
        (332, 40, "waits", ""),
        (372, 134, "moves", "bucket: layer 3"),
        (518, 20, "waits", ""),
        (538, 72, "moves", "layers 2, 1"),
    ):
        parts.append(box(x, low, width, high, kind, words))
    for x, words in ((332, "Start"), (516, "Start")):
        parts.append(arrow((x, top + high), (x + 2, low), gap=2))
        parts.append(text(x - 6, low - 18, words, "small", "end"))
    parts.append(arrow((610, low), (612, top + high), gap=2))
    parts.append(text(332, low + 62, "hidden: the step goes on", "small"))
    parts.append(text(518, low + 62, "exposed: it stands still", "small"))
    legend = (
        ("compute", "computes"),
        ("waits", "waits for the last rank"),
        ("moves", "bytes move"),
    )
    for n, (kind, words) in enumerate(legend):
        parts += [box(120 + 190 * n, 250, 18, 14, kind), text(144 + 190 * n, 262, words, "small")]
    return picture(720, 285, "A training step, with the reductions of two buckets beside it", parts)


def arrows(page: str) -> list[tuple[str, str, str]]:
    """From which state to which, and why, as the internals of elastic jobs list them."""
    found, state = [], ""
    for line in page.splitlines():
        row = re.match(r"^(\(new\)|\w+)? +--> (\w+) +(\S.*)$", line)
        if row:
            state = row[1] or state
            found.append((state, row[2], row[3]))
    return found


def states() -> str:
    """What becomes of a process of an elastic job."""
    places = {
        "(new)": (70.0, 120.0),
        "Joining": (230.0, 60.0),
        "Together": (430.0, 120.0),
        "Reforming": (630.0, 120.0),
        "Over": (430.0, 265.0),
    }
    listed = arrows((PAGES / "internals" / "elastic.md").read_text())
    parts = [text(20, 30, "A process of an elastic job", "head")]
    for number, (start, end, why) in enumerate(listed, 1):
        both = {(a, b) for a, b, _ in listed} >= {(start, end), (end, start)}
        bend = 22 if both else 0
        if {start, end} == {"Joining", "Reforming"}:
            bend = 45
        a, b = places[start], places[end]
        # From edge to edge of boxes of 84 by 36, with some room.
        ux, uy = abs(b[0] - a[0]) / math.dist(a, b), abs(b[1] - a[1]) / math.dist(a, b)
        gap = min(46 / max(ux, 1e-9), 22 / max(uy, 1e-9))
        parts.append(arrow(a, b, gap=gap, bend=bend))
        x, y = middle(a, b, bend)
        parts.append(f'<circle class="moves" cx="{x:.1f}" cy="{y:.1f}" r="10"/>')
        parts.append(text(round(x, 1), round(y, 1) + 4, str(number), "small dark", "middle"))
        parts.append(text(40, 312 + 20 * number, f"{number}  {start} to {end}: {why}", "small"))
    for state, (x, y) in places.items():
        parts.append(box(x - 42, y - 18, 84, 36, "node", state))
    return picture(720, 332 + 20 * len(listed), "The states of a process, and its ways", parts)


DRAWINGS = {"ring-and-direct.svg": ring_and_direct, "step.svg": step, "elastic-states.svg": states}


def main() -> None:
    """Writes all drawings."""
    for name, drawn in DRAWINGS.items():
        (IMAGES / name).write_text(drawn())


if __name__ == "__main__":
    main()
