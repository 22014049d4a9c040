/** The bands below the areas: phases and steps, or the stages of a server. */

import { upperBound } from '../../data/model';
import { color } from '../../theme';
import { BAND, LEFT } from './layout';
import type { Scene } from './scene';

export function paintBands(scene: Scene): void {
  const { context, plot, content } = scene;
  const { process } = content.device;
  if (process.phaseSeq.length === 0) return;
  const top = plot.top + plot.height + 6;
  const write = (text: string, from: number, to: number, y: number, style: string) => {
    context.fillStyle = style;
    context.textAlign = 'center';
    context.fillText(text, (from + to) / 2, y);
  };
  const fits = (text: string, from: number, to: number) => context.measureText(text).width + 6 < to - from;
  for (const { value, from, to } of runs(scene, change => process.phaseOf[change] as number)) {
    const name = process.phases[value] ?? 'other';
    context.fillStyle = color(`phase-${name.replace(/\W/g, '-')}`);
    context.fillRect(from, top, Math.max(1, to - from - 0.5), BAND - 4);
    if (fits(name, from, to)) write(name, from, to, top + BAND - 6, color('on-band'));
  }
  if (!process.stepOf.some(step => step >= 0)) return;
  for (const { value, from, to } of runs(scene, change => process.stepOf[change] as number)) {
    context.fillStyle = color('line');
    context.fillRect(from, top + BAND, Math.max(1, to - from - 1), BAND - 2);
    const label = (value < 0 ? ['before step 0'] : [`step ${value}`, `${value}`]).find(text => fits(text, from, to));
    if (label) write(label, from, to, top + 2 * BAND - 5, color('ink'));
  }
}

/** Adjacent pixel columns in which a value of the change of phase or step, by its number, is the same. */
function runs({ plot, content, viewport, end }: Scene, valueOfChange: (change: number) => number) {
  const { process, pointSeq } = content.device;
  const changeAt = (x: number) => {
    const point = Math.max(0, viewport.pointAt(viewport.positionAt(x)));
    return upperBound(process.phaseSeq, pointSeq[point] ?? 0) - 1;
  };
  const found: { value: number; from: number; to: number }[] = [];
  let [value, from] = [Number.NaN, 0];
  const last = Math.floor(end);
  for (let column = 0; column <= last; column++) {
    const change = changeAt(LEFT + column + 0.5);
    const next = column === last || change < 0 ? Number.NaN : valueOfChange(change);
    if (next === value) continue;
    if (!Number.isNaN(value)) found.push({ value, from: plot.left + from, to: plot.left + column });
    [value, from] = [next, column];
  }
  return found;
}
