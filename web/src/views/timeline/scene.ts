/** What one frame of a timeline is drawn with. */

import type { Content } from './content';
import { LEFT, type Plot } from './layout';
import type { Viewport } from './viewport';

export class Scene {
  constructor(
    readonly context: CanvasRenderingContext2D,
    /** The number of pixels of the canvas in a CSS pixel. */
    readonly ratio: number,
    readonly plot: Plot,
    /** The bytes at the top of the plot. */
    readonly ceiling: number,
    readonly content: Content,
    readonly viewport: Viewport,
  ) {}

  y(bytes: number): number {
    return this.plot.top + this.plot.height * (1 - bytes / this.ceiling);
  }

  /** Where the run ends in the plot, in CSS pixels from its left. Other timelines of the group can be longer. */
  get end(): number {
    const { plot, viewport, content } = this;
    return viewport.group ? Math.max(0, Math.min(plot.width, viewport.x(content.axis.end) - LEFT)) : plot.width;
  }
}
