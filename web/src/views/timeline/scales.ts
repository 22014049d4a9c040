/** The scales: bytes on the left, with lines behind the areas, and the axis at the bottom. */

import * as format from '../../format';
import { color } from '../../theme';
import { BAND } from './layout';
import type { Scene } from './scene';

/** The unit of the labels of bytes, the bytes between two of them, and the bytes at the top of the plot. */
interface ByteScale {
  name: string;
  unit: number;
  step: number;
  ceiling: number;
}

/** The scale for values up to `most` bytes. */
export function byteScale(most: number): ByteScale {
  const [name, unit] = format.byteUnit(most);
  const step = format.labelStep(most / unit, 5) * unit;
  return { name, unit, step, ceiling: Math.ceil((most * 1.02) / step) * step };
}

export function paintBytes(scene: Scene, { name, unit, step, ceiling }: ByteScale): void {
  const { context, plot } = scene;
  const [mute, grid] = [color('mute'), color('line')];
  for (let value = 0; value <= ceiling + step / 2; value += step) {
    context.globalCompositeOperation = 'destination-over';
    context.fillStyle = grid;
    context.fillRect(plot.left, Math.round(scene.y(value)), plot.width, 1);
    context.globalCompositeOperation = 'source-over';
    context.fillStyle = mute;
    context.textAlign = 'right';
    context.fillText(format.axisLabel(value / unit, step / unit), plot.left - 8, scene.y(value) + 4);
  }
  context.textAlign = 'left';
  context.fillText(name, 8, plot.top - 12);
}

/** Draws the axis below the bands and tracks, which have this height. */
export function paintAxis({ context, plot, content, viewport }: Scene, tracksHeight: number): void {
  const { axis } = content;
  const [mute, grid] = [color('mute'), color('line')];
  const y = plot.top + plot.height + 2 * BAND + 10 + tracksHeight;
  let step = format.labelStep(viewport.length, Math.max(2, plot.width / 110));
  if (axis.kind !== 'time') step = Math.max(1, Math.round(step));
  context.textAlign = 'center';
  for (let value = Math.ceil(viewport.from / step) * step; value <= viewport.to; value += step) {
    const x = viewport.x(value);
    context.fillStyle = grid;
    context.fillRect(x, plot.top + plot.height, 1, 4);
    context.fillStyle = mute;
    const text = axis.label(value, step);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.max(plot.left + half - 20, Math.min(x, plot.left + plot.width - half)), y + 8);
  }
  context.textAlign = 'right';
  if (plot.width > 500) context.fillText(axis.title, plot.left + plot.width, y + 22);
}
