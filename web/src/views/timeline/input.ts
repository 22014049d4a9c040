/** Wheel, mouse and fingers on the canvas of a timeline: zoom, pan, brush, point and click. */

import { LEFT } from './layout';
import type { Viewport } from './viewport';

/** What the timeline does with them. Distances are from the upper left corner of the canvas, in CSS pixels. */
interface InputHost {
  zoomTo(from: number, to: number): void;
  pointAt(x: number, y: number): void;
  click(y: number, comparesPoint: boolean): void;
  leave(): void;
  draw(): void;
}

/** A pressed pointer: where, and what was visible then. */
interface Drag {
  x: number;
  from: number;
  to: number;
  brush: boolean;
  moved: boolean;
}

export class PointerInput {
  private drag: Drag | null = null;
  private touches = new Map<number, number>();

  constructor(
    private canvas: HTMLCanvasElement,
    private viewport: Viewport,
    private host: InputHost,
  ) {
    canvas.addEventListener('wheel', event => this.wheel(event), { passive: false });
    canvas.addEventListener('pointerdown', event => this.press(event));
    canvas.addEventListener('pointermove', event => this.move(event));
    canvas.addEventListener('pointerup', event => this.release(event));
    canvas.addEventListener('pointercancel', event => {
      this.touches.delete(event.pointerId);
      this.drag = null;
      host.draw();
    });
    canvas.addEventListener('pointerleave', () => host.leave());
    canvas.addEventListener('dblclick', () => host.zoomTo(...viewport.extent));
  }

  /** Where the part of the axis that a pointer brushes begins; `null` without one. */
  get brushedFrom(): number | null {
    return this.drag?.brush && this.drag.moved ? this.drag.x : null;
  }

  private x(event: MouseEvent): number {
    return event.clientX - this.canvas.getBoundingClientRect().left;
  }

  private y(event: MouseEvent): number {
    return event.clientY - this.canvas.getBoundingClientRect().top;
  }

  private wheel(event: WheelEvent): void {
    const { from, to, length, width } = this.viewport;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey || Math.abs(event.deltaY) >= Math.abs(event.deltaX)) {
      const center = this.viewport.positionAt(Math.max(LEFT, this.x(event)));
      const factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
      this.host.zoomTo(center - (center - from) * factor, center + (to - center) * factor);
    } else {
      const by = (event.deltaX / width) * length;
      this.host.zoomTo(from + by, to + by);
    }
  }

  private press(event: PointerEvent): void {
    if (event.button !== 0) return;
    const { from, to, plotBottom } = this.viewport;
    const x = this.x(event);
    this.touches.set(event.pointerId, x);
    this.canvas.setPointerCapture(event.pointerId);
    // A mouse brushes; with Alt, and below the plot, it pans. A finger pans, two zoom.
    const brush = event.pointerType === 'mouse' && !event.altKey && this.y(event) < plotBottom;
    this.drag = { x, from, to, brush, moved: false };
  }

  private move(event: PointerEvent): void {
    const x = this.x(event);
    const { drag } = this;
    if (this.touches.has(event.pointerId)) {
      const before = [...this.touches.values()];
      this.touches.set(event.pointerId, x);
      const after = [...this.touches.values()];
      if (after.length === 2) return this.pinch(before as [number, number], after as [number, number]);
    }
    if (drag && Math.abs(x - drag.x) > 3) drag.moved = true;
    if (drag?.moved && !drag.brush) {
      const shift = ((drag.x - x) / this.viewport.width) * (drag.to - drag.from);
      return this.host.zoomTo(drag.from + shift, drag.to + shift);
    }
    this.host.pointAt(x, this.y(event));
  }

  private release(event: PointerEvent): void {
    const [x, y] = [this.x(event), this.y(event)];
    const { drag, viewport, host } = this;
    this.touches.delete(event.pointerId);
    this.drag = null;
    if (!drag) return;
    if (drag.moved && drag.brush) {
      host.zoomTo(viewport.positionAt(Math.min(drag.x, x)), viewport.positionAt(Math.max(drag.x, x)));
    } else if (!drag.moved) {
      host.pointAt(x, y);
      host.click(y, event.shiftKey);
    }
    host.draw();
  }

  /** Zooms so that what was under two fingers stays under them. */
  private pinch(before: [number, number], after: [number, number]): void {
    const { viewport } = this;
    const [a, b] = [viewport.positionAt(before[0]), viewport.positionAt(before[1])];
    const scale = (b - a) / Math.max(1, Math.abs(after[1] - after[0])) / Math.sign(after[1] - after[0] || 1);
    const from = a - (after[0] - LEFT) * scale;
    if (this.drag) this.drag.moved = true;
    this.host.zoomTo(from, from + viewport.width * scale);
  }
}
