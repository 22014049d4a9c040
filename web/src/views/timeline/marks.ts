/** Vertical lines with texts: the peak, errors, the selected points and the cursor; and shaded ranges of the axis. */

import type { RankTotals } from '../../data/rank_totals';
import * as format from '../../format';
import { color } from '../../theme';
import type { Content } from './content';
import type { Plot } from './layout';
import type { Scene } from './scene';

/** A mark of the recording, which stays where it is on the axis. */
export interface Mark {
  position: number;
  text: string;
  kind: 'peak' | 'oom' | 'found';
}

/** The marks of the drawn device, in the order in which they get their texts. */
export function marksOf(content: Content): Mark[] {
  const { whole: device, peak: compared, sum, summary } = content;
  const position = (point: number) => content.axis.position[point] ?? 0;
  const mark = (kind: 'peak' | 'found', label: string, point: number) => ({
    position: position(point),
    text: `${label} ${format.size(device.total[point] as number)}`,
    kind,
  });
  const marks: Mark[] = device.points > 0 ? [mark('peak', 'peak', device.peak)] : [];
  if (device.points > 0 && compared !== device.peak) marks.unshift(mark('found', 'compared:', compared));
  for (const oom of summary?.ooms ?? []) {
    marks.push(oomMark(position(device.pointOf(oom.in_use.seq)), oom.requested_bytes));
  }
  return sum ? [...marks, ...errorsOfRanks(content, sum)] : marks;
}

function oomMark(position: number, requested: number, rank = ''): Mark {
  return { position, text: `${rank}out of memory: requested ${format.size(requested)}`, kind: 'oom' };
}

/** The errors of all ranks, on the timeline of the sum. */
function errorsOfRanks(content: Content, sum: RankTotals): Mark[] {
  return sum.devices.flatMap((device, rank) =>
    (content.summaryOf(device)?.ooms ?? []).map(oom => {
      const point = sum.pointAt({ device, point: device.pointOf(oom.in_use.seq) });
      return oomMark(content.axis.position[point] ?? 0, oom.requested_bytes, `${sum.series[rank]?.label} `);
    }),
  );
}

/** A vertical line. The distance of its text from the plot is that of its row. */
interface Line {
  position: number;
  style: string;
  dash: number[];
  text?: string;
  row?: number;
}

/** Draws lines in this order. Of lines whose texts would overlap, the first has its text. */
function paintVerticals({ context, plot, viewport }: Scene, lines: Line[]): void {
  const taken: { row: number; start: number; end: number }[] = [];
  for (const { position, style, dash, text, row = 0 } of lines) {
    const x = viewport.x(position);
    if (x < plot.left - 1 || x > plot.left + plot.width + 1) continue;
    context.strokeStyle = style;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x, plot.top - 4);
    context.lineTo(x, plot.top + plot.height);
    context.stroke();
    context.setLineDash([]);
    if (!text) continue;
    context.fillStyle = style;
    const wide = context.measureText(text).width;
    const isLeft = x + wide + 8 > plot.left + plot.width;
    context.textAlign = isLeft ? 'right' : 'left';
    const start = isLeft ? x - 5 - wide : x + 5;
    if (taken.some(one => one.row === row && start < one.end + 6 && one.start < start + wide + 6)) continue;
    taken.push({ row, start, end: start + wide });
    context.fillText(text, x + (isLeft ? -5 : 5), plot.top - 8 - row);
  }
}

/** Shades the plot between two distances from the left. */
function shade(context: CanvasRenderingContext2D, plot: Plot, from: number, width: number, alpha: number): void {
  context.fillStyle = color('accent');
  context.globalAlpha = alpha;
  context.fillRect(from, plot.top, width, plot.height);
  context.globalAlpha = 1;
}

/** What the reader points at and has chosen. */
interface Pointed {
  /** The point under the cursor; -1 without one. */
  hover: number;
  /** Where the part of the axis that a pointer brushes begins, in CSS pixels; `null` without one. */
  brushedFrom: number | null;
  /** The selected range of the axis. */
  range: [number, number] | null;
}

export function paintMarks(scene: Scene, marks: Mark[], { hover, brushedFrom, range }: Pointed): void {
  const { context, plot, content, viewport } = scene;
  const { point, base } = content.state.now;
  const [ink, accent] = [color('ink'), color('accent')];
  const hovered = content.axis.position[hover] ?? 0;
  if (range) {
    const inside = (position: number) => Math.max(plot.left, Math.min(viewport.x(position), plot.left + plot.width));
    const low = inside(range[0]);
    shade(context, plot, low, Math.max(1, inside(range[1]) - low), 0.12);
  }
  const lines: Line[] = marks.map(({ position, text, kind }) => {
    const [style, row] = kind === 'oom' ? [color('bad'), 13] : [ink, 0];
    return { position, text, dash: [4, 3], style, row };
  });
  lines.push({ position: content.positionOfPoint(point), style: accent, dash: [] });
  if (base >= 0) {
    lines.push({ position: content.positionOfPoint(base), style: accent, dash: [2, 2], text: 'compared with' });
  }
  if (hover >= 0) lines.push({ position: hovered, style: color('mute'), dash: [1, 2] });
  paintVerticals(scene, lines);
  if (brushedFrom !== null && hover >= 0) {
    const x = viewport.x(hovered);
    shade(context, plot, Math.min(x, brushedFrom), Math.abs(x - brushedFrom), 0.18);
  }
}
