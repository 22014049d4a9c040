/** The memory map: the segments of PyTorch's caching allocator, and the blocks in them. */

import type { Device } from '../data/model';
import { type SegmentAt, segmentsAt } from '../data/segments';
import { el, replace } from '../dom';
import * as format from '../format';
import { color, onThemeChange } from '../theme';

const ROW = 18;
const GAP = 5;
const LABEL = 150;
/** The number of segments drawn at first. */
const SHOWN = 60;

export class MemoryMap {
  readonly element: HTMLElement;
  private canvas = el('canvas', { role: 'img', 'aria-label': 'Memory map: segments and the blocks in them' });
  private readout = el('div', { class: 'readout', role: 'status' });
  private about = el('p', { class: 'note' });
  private more = el('button', { type: 'button', onclick: () => this.showAll() }, 'Show all segments');
  private segments: SegmentAt[] = [];
  private device: Device | null = null;
  private shown = SHOWN;

  constructor(
    private colorOf: (category: string) => string,
    private describe: (block: number) => string,
  ) {
    this.element = el('div', {}, this.about, this.canvas, this.readout, this.more);
    this.canvas.addEventListener('pointermove', event => this.hover(event));
    this.canvas.addEventListener('pointerdown', event => this.hover(event));
    onThemeChange(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(device: Device, seq: number, blocks: number[]): void {
    this.device = device;
    this.shown = SHOWN;
    const { info } = device;
    if (device.segments.seq.length === 0 || info.segments_left_out > 0) {
      this.segments = [];
      replace(
        this.about,
        info.segments_left_out > 0
          ? 'This run has too many segment events for a memory map in a page.'
          : 'The recording has no segments: its events are not those of PyTorch\u2019s caching allocator.',
      );
      this.canvas.hidden = this.more.hidden = true;
      replace(this.readout);
      return;
    }
    this.canvas.hidden = false;
    this.segments = segmentsAt(device, seq, blocks);
    const free = (segment: SegmentAt) => segment.size - segment.used;
    this.segments.sort((a, b) => free(b) - free(a) || a.address - b.address);
    const sum = (value: (segment: SegmentAt) => number) =>
      this.segments.reduce((all, segment) => all + value(segment), 0);
    const held = this.segments.filter(segment => segment.used > 0 && free(segment) > 0);
    const empty = this.segments.filter(segment => segment.used === 0);
    replace(
      this.about,
      `${format.number(this.segments.length, 'segment')}, ${format.size(sum(one => one.size))} reserved, ` +
        `${format.size(sum(free))} unallocated. `,
      info.rest
        ? 'Blocks that the page does not list are drawn as unallocated. '
        : `${format.size(empty.reduce((all, one) => all + one.size, 0))} can be released: segments without a block. ` +
            `Live blocks keep ${format.size(held.reduce((all, one) => all + free(one), 0))} in ` +
            `${format.number(held.length, 'segment')} from being released. `,
      'Most unallocated first; a wider bar is a larger segment.',
    );
    this.draw();
  }

  private showAll(): void {
    this.shown = this.segments.length;
    this.draw();
  }

  private width(segment: SegmentAt): number {
    const largest = this.segments.reduce((most, one) => Math.max(most, one.size), 1);
    // The square root lets small segments be seen beside large ones.
    return Math.max(6, (this.canvas.clientWidth - this.label() - 4) * Math.sqrt(segment.size / largest));
  }

  private label(): number {
    return this.canvas.clientWidth < 500 ? 84 : LABEL;
  }

  private draw(): void {
    const { device, canvas } = this;
    if (!device || canvas.hidden || canvas.clientWidth === 0) return;
    const rows = Math.min(this.shown, this.segments.length);
    // Chromium draws no canvas higher than 32,767 pixels.
    const height = Math.min(16_000, Math.max(1, rows) * (ROW + GAP));
    const ratio = height > 8000 ? 1 : Math.min(2, devicePixelRatio || 1);
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [Math.round(canvas.clientWidth * ratio), Math.round(height * ratio)];
    const context = canvas.getContext('2d') as CanvasRenderingContext2D;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = '12px system-ui, sans-serif';
    this.more.hidden = rows >= this.segments.length;
    const { process } = device;
    this.segments.slice(0, rows).forEach((segment, row) => {
      const y = row * (ROW + GAP);
      const wide = this.width(segment);
      context.fillStyle = color('mute');
      context.textAlign = 'right';
      const text =
        this.label() < LABEL
          ? format.size(segment.size)
          : `${format.size(segment.used)} of ${format.size(segment.size)}`;
      context.fillText(text, this.label() - 8, y + 13);
      context.fillStyle = color('free');
      context.fillRect(this.label(), y, wide, ROW);
      for (const block of segment.blocks) {
        const from = ((device.address[block] as number) - segment.address) / segment.size;
        const part = (device.size[block] as number) / segment.size;
        context.fillStyle = color(
          this.colorOf(process.categories[process.category(device.site[block] as number)]?.name ?? 'unknown'),
        );
        const x = this.label() + wide * from;
        context.fillRect(x, y, Math.max(1, wide * part - (wide * part > 3 ? 1 : 0)), ROW);
      }
      context.strokeStyle = color('mute');
      context.strokeRect(this.label() + 0.5, y + 0.5, wide - 1, ROW - 1);
    });
  }

  private hover(event: PointerEvent): void {
    const { device } = this;
    const bounds = this.canvas.getBoundingClientRect();
    const segment = this.segments[Math.floor((event.clientY - bounds.top) / (ROW + GAP))];
    if (!device || !segment) return;
    const at = segment.address + ((event.clientX - bounds.left - this.label()) / this.width(segment)) * segment.size;
    const block = segment.blocks.find(one => {
      const address = device.address[one] as number;
      return address <= at && at < address + (device.size[one] as number);
    });
    const free = segment.size - segment.used;
    const largest = [...segment.blocks].sort((a, b) => (device.size[b] as number) - (device.size[a] as number))[0];
    const name = segment.expandable ? 'Expandable segment' : 'Segment';
    replace(
      this.readout,
      `${name} at 0x${segment.address.toString(16)}: ${format.size(segment.size)}, ` +
        `${format.size(segment.used)} in ${format.number(segment.blocks.length, 'block')}. `,
      block !== undefined ? `Block: ${this.describe(block)}. ` : '',
      block === undefined && largest !== undefined && free > 0
        ? `${format.size(free)} cannot be released while this block is live: ${this.describe(largest)}.`
        : '',
      segment.blocks.length === 0 ? 'No block is in it, so the allocator can release it.' : '',
    );
  }
}
