/** Several processes and devices side by side: a small timeline of each, on the same scale. */

import { type Extremes, extremesOf } from '../data/extremes';
import type { Device } from '../data/model';
import { SeriesSet } from '../data/series';
import type { State } from '../data/state';
import { el } from '../dom';
import * as format from '../format';
import { color, onThemeChange } from '../theme';

const HEIGHT = 90;

export function ranksView(
  devices: { name: string; device: Device; issues: number; failed: boolean }[],
  state: State,
): HTMLElement | null {
  if (devices.length < 2) return null;
  const most = Math.max(1, ...devices.map(({ device }) => device.total[device.peak] ?? 0));
  const draws: (() => void)[] = [];
  const cards = devices.map(({ name, device, issues, failed }) => {
    const canvas = el('canvas', { role: 'img', 'aria-label': `Allocated memory of ${name}` });
    const set = new SeriesSet(device, 'category');
    const extremes = extremesOf(device.total);
    draws.push(() => draw(canvas, device, set, extremes, most));
    const peak = device.total[device.peak] ?? 0;
    const end = device.total[device.points - 1] ?? 0;
    return el(
      'button',
      { type: 'button', class: 'rank', onclick: () => state.set({ device, point: device.peak, base: -1 }) },
      el('b', {}, name, failed ? el('span', { class: 'bad' }, ' out of memory') : ''),
      canvas,
      el(
        'span',
        {},
        `peak ${format.size(peak)}, end ${format.size(end)}${issues > 0 ? `, ${format.number(issues, 'issue')}` : ''}`,
      ),
    );
  });
  const redraw = () => requestAnimationFrame(() => draws.forEach(one => one()));
  onThemeChange(redraw);
  const section = el(
    'section',
    { class: 'card w12', id: 'ranks' },
    el('h2', {}, 'Ranks and devices'),
    el('div', { class: 'ranks' }, cards),
  );
  new ResizeObserver(redraw).observe(section);
  return section;
}

function draw(canvas: HTMLCanvasElement, device: Device, set: SeriesSet, extremes: Extremes, most: number): void {
  const width = canvas.clientWidth;
  if (width === 0) return;
  [canvas.width, canvas.height] = [width, HEIGHT];
  const context = canvas.getContext('2d') as CanvasRenderingContext2D;
  const values = new Float64Array(set.series.length);
  for (let column = 0; column < width; column++) {
    const from = Math.floor((column / width) * device.points);
    const to = Math.max(from + 1, Math.floor(((column + 1) / width) * device.points));
    if (from >= device.points) break;
    set.at(extremes.highest(from, Math.min(to, device.points)), values);
    let bottom = HEIGHT;
    values.forEach((bytes, series) => {
      const high = (bytes / most) * HEIGHT;
      context.fillStyle = color((set.series[series] as { color: string }).color);
      context.fillRect(column, bottom - high, 1, high);
      bottom -= high;
    });
  }
}
