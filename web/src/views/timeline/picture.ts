/** The canvas of a timeline, drawn at most once per frame of the browser. */

import { el } from '../../dom';

/** Where the latest frame drew, for tests and the benchmark. */
interface Geometry {
  left: number;
  top: number;
  width: number;
  height: number;
  /** The bytes at the top. */
  ceiling: number;
  /** The visible part of the axis. */
  from: number;
  to: number;
  ratio: number;
}

export class Picture {
  readonly canvas = el('canvas', { tabindex: 0, role: 'application' });
  /** How long the latest frame took to draw, in milliseconds. */
  drawMs = 0;
  frames = 0;
  /** The areas of the latest frame. */
  image: ImageData | null = null;
  geometry: Geometry = { left: 0, top: 0, width: 0, height: 0, ceiling: 1, from: 0, to: 1, ratio: 1 };
  private pending = false;

  constructor(private paint: () => void) {}

  draw(): void {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      const start = performance.now();
      this.paint();
      this.drawMs = performance.now() - start;
      this.frames += 1;
    });
  }

  /** The cleared canvas of this height, and its pixels per CSS pixel; `null` if it has no width. */
  begin(height: number): { context: CanvasRenderingContext2D; ratio: number } | null {
    const { canvas } = this;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    const width = canvas.clientWidth;
    if (width === 0) return null;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext('2d') as CanvasRenderingContext2D;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = '12px system-ui, sans-serif';
    return { context, ratio };
  }
}
