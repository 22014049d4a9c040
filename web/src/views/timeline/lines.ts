/** The lines over the areas: reserved memory, what the process uses of the device, and the device's capacity. */

import { highestBetween } from '../../data/extremes';
import type { Changes } from '../../data/model';
import { color } from '../../theme';
import type { Content } from './content';
import { LEFT } from './layout';
import type { Scene } from './scene';

export type LineName = 'reserved' | 'used' | 'capacity';

export class Lines {
  private shown = new Set<LineName>(['reserved', 'used']);

  constructor(private content: Content) {}

  has(name: LineName): boolean {
    return this.shown.has(name);
  }

  show(name: LineName): void {
    this.shown.add(name);
  }

  toggle(name: LineName): void {
    if (!this.shown.delete(name)) this.shown.add(name);
  }

  /** Whether the recording has the values of a line. */
  exists(name: LineName): boolean {
    const { device, summary } = this.content;
    if (name === 'capacity') return summary?.total_bytes !== undefined;
    return (name === 'reserved' ? device.reserved : device.physical).seq.length > 0;
  }

  /** The highest value of the shown lines between two events. */
  highest(seqs: [number, number]): number {
    const { device, summary } = this.content;
    return Math.max(
      this.has('reserved') ? highestBetween(device.reserved, seqs) : 0,
      this.has('used') ? highestBetween(device.physical, seqs) : 0,
      this.has('capacity') ? (summary?.total_bytes ?? 0) : 0,
    );
  }

  paint(scene: Scene): void {
    const { device, summary } = this.content;
    if (this.has('reserved')) stroke(scene, device.reserved, color('ink'), []);
    if (this.has('used')) stroke(scene, device.physical, color('mute'), [5, 3]);
    const capacity = summary?.total_bytes;
    if (this.has('capacity') && capacity !== undefined) {
      scene.context.fillStyle = color('bad');
      scene.context.fillRect(scene.plot.left, Math.round(scene.y(capacity)), scene.plot.width, 2);
    }
  }
}

function stroke(scene: Scene, changes: Changes, style: string, dash: number[]): void {
  const { context, plot, viewport, ceiling, end } = scene;
  if (changes.seq.length === 0) return;
  context.strokeStyle = style;
  context.setLineDash(dash);
  context.lineWidth = 1.5;
  context.beginPath();
  let before = -1;
  for (let column = 0; column <= end; column++) {
    // The highest value of the column: no peak is lost.
    const value = Math.min(ceiling, highestBetween(changes, viewport.eventsOfColumn(LEFT + column, 1)));
    if (before < 0) context.moveTo(plot.left + column, scene.y(value));
    else if (value !== before) {
      context.lineTo(plot.left + column, scene.y(before));
      context.lineTo(plot.left + column, scene.y(value));
    }
    before = value;
  }
  context.lineTo(plot.left + end, scene.y(before));
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
}
