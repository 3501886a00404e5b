"""Draw a flow: as a table for the terminal, and as an SVG picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from megarl.flow.columns import is_state
from megarl.flow.graph import Graph, Meshes
from megarl.flow.node import Node

COLOURS = ("#cfe3f7", "#d8eecf", "#fbe3c4", "#ead7f3", "#f8d3d3", "#d2eeee", "#f1ecc3", "#e0e0e0")
_CHAR = 6.6
"""Width in pixels of a character of the 11 px font."""
_LINE = 17
"""Height in pixels of a line."""
_PAD = 12
"""Distance in pixels between shapes."""


def draw_text(flow: Graph, meshes: Meshes | None) -> str:
    """Return a table with one line per node, by depth in the graph. Nodes of one depth may overlap if their
    ranks do not."""
    rows = [("", "node", "ranks", "reads", "writes")]
    for node in _by_depth(flow):
        reads = ", ".join(f"({column})" if is_state(column) else column for column in node.reads or ())
        name = f"{node.name}{' (background)' if node.background else ''}"
        rows.append(
            (
                str(flow.depth.get(node.name, "?")),
                name,
                _ranks(node, meshes),
                reads or "-",
                ", ".join(node.writes or ()) or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip() for row in rows
    ]
    table += [
        f"later steps: {writer} -> {rollout}, staleness <= {steps}"
        for writer, rollout, steps in flow.stale_edges
    ]
    return "\n".join([*table, f"longest chain: {' -> '.join(longest_chain(flow)) or 'none'}", ""])


def longest_chain(flow: Graph) -> list[str]:
    """Return the names of the longest chain of nodes that are not in the background. A step runs these nodes
    one after another."""
    background = {node.name for node in flow.nodes if node.background}
    chain = [name for name in flow.depth if name not in background]
    chain = [max(chain, key=flow.depth.__getitem__)] if chain else []
    while chain and flow.dependencies[chain[0]]:
        chain.insert(0, max(flow.dependencies[chain[0]], key=flow.depth.__getitem__))
    return chain


def draw_svg(flow: Graph, meshes: Meshes | None) -> str:
    """Return the text of an SVG picture: nodes from left to right by depth, with a lane for each set of
    ranks.

    An edge ends at the names of the columns that it carries. Background nodes and state are dashed. A line
    below the lanes leads from the last weights back to a rollout with a staleness."""
    edges = {
        node.name: [(need, columns) for need, columns in flow.dependencies[node.name].items() if columns]
        for node in flow.nodes
    }
    nodes = _by_depth(flow)
    lanes: dict[str, list[Node]] = {}
    for node in nodes:
        lanes.setdefault(_lane(node, meshes), []).append(node)
    node_width = 2 * _PAD + _CHAR * max(len(node.name) for node in nodes)
    gap = 4 * _PAD + _CHAR * max((len(", ".join(c)) for into in edges.values() for _, c in into), default=4)
    label_width = 2 * _PAD + _CHAR * max(map(len, lanes))
    boxes: dict[str, tuple[float, float, float]] = {}  # node -> x, y, height
    shapes, y = [], float(_PAD)
    num_levels = 1 + max(flow.depth.values(), default=0)
    width = label_width + num_levels * (node_width + gap)
    for number, (lane, members) in enumerate(lanes.items()):
        bottoms: dict[int, float] = {}
        for node in members:
            level = flow.depth.get(node.name, 0)
            top, height = bottoms.get(level, y + _PAD), _PAD + _LINE * max(1, len(edges[node.name]))
            boxes[node.name] = (label_width + level * (node_width + gap) + gap - _PAD, top, height)
            bottoms[level] = top + height + _PAD
        bottom, colour = max(bottoms.values()), COLOURS[number % len(COLOURS)]
        shapes.append(
            f'<rect x="0" y="{y:.0f}" width="{width:.0f}" height="{bottom - y:.0f}" fill="{colour}" '
            'fill-opacity="0.35"/>'
        )
        shapes.append(_label(_PAD, (y + bottom) / 2 + 4, lane))
        shapes += [_box(node, *boxes[node.name], node_width, colour) for node in members]
        y = bottom + _PAD
    arrows = [arrow for name, into in edges.items() for arrow in _arrows(boxes, name, into, node_width)]
    for writer, rollout, steps in flow.stale_edges:
        y += _LINE
        arrows += _stale_arrow(boxes[writer], boxes[rollout], node_width, y, steps)
        y += _PAD
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
            f'viewBox="0 0 {width:.0f} {y:.0f}" '
            'font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            *shapes,
            *arrows,
            "</svg>",
            "",
        ]
    )


def _box(node: Node, x: float, y: float, height: float, width: float, colour: str) -> str:
    dashed = ' stroke-dasharray="4 3"' if node.background else ""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5" '
        f'fill="{colour}" stroke="#444"{dashed}/>'
        + _label(x + width / 2, y + height / 2 + 4, node.name, "middle")
    )


def _arrows(
    boxes: Mapping[str, tuple[float, float, float]],
    name: str,
    into: Sequence[tuple[str, Sequence[str]]],
    width: float,
) -> list[str]:
    """Return SVG curves from the nodes in `into` to the node `name`, one below the other, each with the names
    of its columns."""
    x, y, _ = boxes[name]
    shapes = []
    for i, (source, columns) in enumerate(into):
        text, (source_x, source_y, source_height) = ", ".join(columns), boxes[source]
        start_x, start_y, port_y = (
            source_x + width,
            source_y + source_height / 2,
            y + _PAD / 2 + _LINE * (i + 0.5),
        )
        end_x = x - _PAD - _CHAR * len(text)
        bend = max(30.0, (end_x - start_x) / 2)
        dashed = ' stroke-dasharray="3 3"' if all(map(is_state, columns)) else ""
        shapes.append(
            f'<path d="M{start_x:.0f},{start_y:.0f} C{start_x + bend:.0f},{start_y:.0f} '
            f"{end_x - bend:.0f},{port_y:.0f} "
            f'{end_x:.0f},{port_y:.0f}" fill="none" stroke="#666" stroke-opacity="0.7"{dashed}/>'
        )
        shapes.append(_label(x - 4, port_y + 4, text, "end", "#333"))
    return shapes


def _stale_arrow(
    writer: tuple[float, float, float],
    rollout: tuple[float, float, float],
    width: float,
    y: float,
    staleness: int,
) -> list[str]:
    """Return a dashed line from a writer of weights back to a rollout, below all lanes, and its label."""
    start, end = writer[0] + width * 0.75, rollout[0] + width * 0.25
    down, up = writer[1] + writer[2], rollout[1] + rollout[2]
    return [
        f'<path d="M{start:.0f},{down:.0f} V{y:.0f} H{end:.0f} V{up:.0f}" '
        'fill="none" stroke="#666" stroke-opacity="0.7" stroke-dasharray="3 3"/>',
        _label((start + end) / 2, y - 4, f"staleness <= {staleness}", "middle", "#333"),
    ]


def _label(x: float, y: float, text: str, anchor: str = "start", colour: str = "#000") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _by_depth(flow: Graph) -> list[Node]:
    """Return the nodes by their depth in the graph. Nodes that wait for each other in a cycle come last."""
    return sorted(flow.nodes, key=lambda node: flow.depth.get(node.name, len(flow.nodes)))


def _ranks(node: Node, meshes: Meshes | None) -> str:
    if node.function is not None:
        return "driver"
    if meshes is None:
        return "-"
    return ranges(meshes[node.role].ranks) if node.role in meshes else "none"


def _lane(node: Node, meshes: Meshes | None) -> str:
    ranks = _ranks(node, meshes)
    if meshes is None or ranks == "none":
        return node.role
    return ranks if ranks == "driver" else f"ranks {ranks}"


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text: (0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
