"""Draws docs/images/timeline.svg from the blocks of a run of examples/gpt.py:

    memtrace export RUN --to csv -o blocks.csv
    python3 docs/images/timeline.py blocks.csv > docs/images/timeline.svg
"""

import csv
import sys
from collections import defaultdict

# The drawing order, from the bottom, with the colors of memtrace's own timeline.
CATEGORIES = [("parameter", "parameters", "#1e4bab"), ("optimizer_state", "optimizer state", "#d97d00"),
              ("gradient", "gradients", "#008c67"), ("activation", "activations", "#e73957"),
              ("autograd_detail", "autograd temporaries", "#9f5aa4"), ("temporary", "other temporaries", "#8c91a6"),
              ("workspace", "cuBLAS workspaces", "#59636f")]
PHASES = {"load": "#efefef", "data": "#efefef", "forward": "#e7f1e3", "backward": "#fbe8e2", "optimizer": "#fdf3d8"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 400, 58, 14, 62, 46
GIB = 1 << 30

blocks = list(csv.DictReader(open(sys.argv[1])))
events = []
for block in blocks:
    events.append((int(block["alloc_seq"]), int(block["size"]), block))
    if block["free_seq"]:
        events.append((int(block["free_seq"]), -int(block["size"]), block))
events.sort(key=lambda event: event[0])

# Bytes by category after each event. Of the events that fall on one pixel the one with the most bytes is drawn.
now, states, spans = defaultdict(int), [], []
for number, (seq, size, block) in enumerate(events):
    now[block["category"]] += size
    states.append([now[name] for name, _, _ in CATEGORIES])
    if size > 0:
        part = (block["step"], block["phase"])
        if not spans or spans[-1][0] != part:
            spans.append([part, number])
# The program ends at its last allocation: what is freed afterwards is the interpreter's end.
last = max(number for number, event in enumerate(events) if event[1] > 0)
states = states[:last + 1]
columns = WIDTH - LEFT - RIGHT
drawn = []
for column in range(columns):
    first, end = column * len(states) // columns, max((column + 1) * len(states) // columns, column * len(states) // columns + 1)
    drawn.append(max(states[first:end], key=sum))
peak_at = max(range(len(states)), key=lambda number: sum(states[number]))
peak = sum(states[peak_at])
top = 15 * GIB


def x(number):
    return LEFT + number * columns / len(states)


def y(size):
    return HEIGHT - BOTTOM - size / top * (HEIGHT - TOP - BOTTOM)


out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
       'aria-label="Allocated GPU memory by category over the events of a training run">',
       '<style>text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: bold; font-size: 14px } '
       '.end { text-anchor: end } .mid { text-anchor: middle } .small { font-size: 11px; fill: #666 }</style>',
       f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
       f'<text class="title" x="{LEFT}" y="20">Allocated GPU memory by category: examples/gpt.py, 406 M parameters, Adam, three steps</text>']
# Phases, behind the picture: a span of few pixels belongs to its neighbor.
merged = []
for (part, number), end in zip(spans, [start for _, start in spans[1:]] + [len(states)]):
    if merged and x(end) - x(number) < 4:
        merged[-1][2] = end
    elif merged and merged[-1][0] == part:
        merged[-1][2] = end
    else:
        merged.append([part, number, end])
for (step, phase), start, end in merged:
    color, width, height = PHASES.get(phase, "#efefef"), x(end) - x(start), HEIGHT - TOP - BOTTOM
    out.append(f'<rect x="{x(start):.0f}" y="{TOP}" width="{width:.0f}" height="{height}" fill="{color}"/>')
    if x(end) - x(start) > 30:
        out.append(f'<text class="mid small" x="{(x(start) + x(end)) / 2:.0f}" y="{HEIGHT - BOTTOM + 15}">{phase}</text>')
for step in sorted({part[0] for part, _, _ in merged if part[0]}):
    first = min(start for part, start, _ in merged if part[0] == step)
    end = max(end for part, _, end in merged if part[0] == step)
    out.append(f'<line x1="{x(first):.0f}" x2="{x(first):.0f}" y1="{TOP}" y2="{HEIGHT - BOTTOM + 34}" stroke="#999"/>')
    out.append(f'<text class="mid" x="{(x(first) + x(end)) / 2:.0f}" y="{HEIGHT - BOTTOM + 32}">step {step}</text>')
for gib in (0, 5, 10, 15):
    out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(gib * GIB):.0f}" y2="{y(gib * GIB):.0f}" stroke="#ddd"/>')
    out.append(f'<text class="end" x="{LEFT - 6}" y="{y(gib * GIB) + 4:.0f}">{gib} GiB</text>')
below = [0] * columns


def edge(sizes, leftward):
    """A line of steps over the columns, as a path: only where it changes."""
    order = range(columns - 1, -1, -1) if leftward else range(columns)
    path, height = "", None
    for column in order:
        here = round(y(sizes[column]))
        if here != height:
            path += f"H{LEFT + column + leftward}V{here}"
            height = here
    return path + f"H{LEFT if leftward else LEFT + columns}"


for index, (_, _, color) in enumerate(CATEGORIES):
    above = [low + state[index] for low, state in zip(below, drawn)]
    out.append(f'<path fill="{color}" d="M{LEFT},{round(y(above[0]))}{edge(above, False)}{edge(below, True)}z"/>')
    below = above
at = LEFT
for _, label, color in CATEGORIES:
    out.append(f'<rect x="{at}" y="33" width="11" height="11" fill="{color}"/><text x="{at + 15}" y="43">{label}</text>')
    at += 30 + 6.6 * len(label)
block = events[peak_at][2]
out.append(f'<line x1="{x(peak_at):.0f}" x2="{x(peak_at):.0f}" y1="{y(peak):.0f}" y2="{TOP + 6}" stroke="#000"/>')
out.append(f'<text x="{x(peak_at) + 6:.0f}" y="{TOP + 14}">peak {peak / GIB:.1f} GiB: step {block["step"]}, {block["phase"]}, {block["node"]}</text>')
out.append("</svg>")
print("\n".join(out))
