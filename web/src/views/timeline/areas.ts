/** The areas: the bytes of each series, stacked. Every drawn value existed. */

import { color, rgb } from '../../theme';
import { LEFT } from './layout';
import type { Scene } from './scene';

/**
 * Draws the series of each pixel column as at its highest point, and paler above its lowest one. Gives the drawn
 * pixels.
 */
export function paintAreas({ context, ratio, plot, ceiling, content, viewport, end }: Scene): ImageData {
  const { device, set, extremes } = content;
  const columns = Math.max(1, Math.round(plot.width * ratio));
  const rows = Math.max(1, Math.round(plot.height * ratio));
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const background = rgb(color('card'));
  const solid = set.series.map(series => packed(rgb(color(series.color))));
  const pale = set.series.map(series => packed(halfway(rgb(color(series.color)), background)));
  const gap = packed(background);
  const values = new Float64Array(set.series.length);
  let [lastPoint, lastLow] = [-1, -1];
  for (let column = 0; column < Math.min(columns, end * ratio); column++) {
    const [from, to] = viewport.column(LEFT + column / ratio, 1 / ratio);
    if (to <= from) continue;
    const high = extremes.highest(from, to);
    const low = device.total[extremes.lowest(from, to)] as number;
    if (high === lastPoint && low === lastLow && column > 0) {
      for (let row = 0, at = column; row < rows; row++, at += columns) pixels[at] = pixels[at - 1] as number;
      continue;
    }
    [lastPoint, lastLow] = [high, low];
    set.at(high, values);
    const lowRow = rows - Math.round((low / ceiling) * rows);
    let bytes = 0;
    let bottom = rows;
    for (let series = 0; series < values.length; series++) {
      bytes += values[series] as number;
      const top = Math.max(0, rows - Math.round((bytes / ceiling) * rows));
      const [dark, light] = [solid[series] as number, pale[series] as number];
      for (let row = top, at = top * columns + column; row < bottom; row++, at += columns) {
        pixels[at] = row >= lowRow ? dark : light;
      }
      // A line of the background between series helps those who do not see the colors.
      if (bottom - top > 3 && series > 0 && bottom < rows) pixels[(bottom - 1) * columns + column] = gap;
      bottom = Math.min(bottom, top);
    }
  }
  context.putImageData(image, Math.round(plot.left * ratio), Math.round(plot.top * ratio));
  return image;
}

function packed([red, green, blue]: [number, number, number]): number {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function halfway(a: [number, number, number], b: [number, number, number]): [number, number, number] {
  const mean = (i: 0 | 1 | 2) => Math.round(a[i] * 0.5 + b[i] * 0.5);
  return [mean(0), mean(1), mean(2)];
}
