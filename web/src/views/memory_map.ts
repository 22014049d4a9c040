/**
 * The memory map: the segments of PyTorch's caching allocator, and the blocks in them. One segment follows the other,
 * as the words of a text do, and all rows have the same scale.
 */

import type { Device } from '../data/model';
import { type SegmentAt, segmentsAt } from '../data/segments';
import { el, replace } from '../dom';
import * as format from '../format';
import { color, onThemeChange } from '../theme';

const ROW = 18;
const GAP = 5;
const LABEL = 64;
/** The rows of the map are at most twice as many. */
const MIN_ROWS = 24;
/** The smallest segment of PyTorch's allocator, which fills a row of its own at most. */
const MIN_ROW_BYTES = 2 * 2 ** 20;
/** Segments and blocks that are narrower have no border, so that their colors are seen. */
const BORDERED = 4;

/** A segment, and where it begins in the map, in bytes. */
interface Placed extends SegmentAt {
  from: number;
}

export class MemoryMap {
  readonly element: HTMLElement;
  private canvas = el('canvas', { role: 'img', 'aria-label': 'Memory map: segments and the blocks in them' });
  private readout = el('div', { class: 'readout', role: 'status' });
  private about = el('p', { class: 'note' });
  private segments: Placed[] = [];
  private reserved = 0;
  private device: Device | null = null;

  constructor(
    private colorOf: (category: string) => string,
    private describe: (block: number) => string,
  ) {
    this.element = el('div', {}, this.about, this.canvas, this.readout);
    this.canvas.addEventListener('pointermove', event => this.hover(event));
    this.canvas.addEventListener('pointerdown', event => this.hover(event));
    onThemeChange(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(device: Device, seq: number, blocks: number[]): void {
    this.device = device;
    const { info } = device;
    if (device.segments.seq.length === 0 || info.segments_left_out > 0) {
      this.segments = [];
      replace(
        this.about,
        info.segments_left_out > 0
          ? 'This run has too many segment events for a memory map in a page.'
          : 'The recording has no segments: its events are not those of PyTorch\u2019s caching allocator.',
      );
      this.canvas.hidden = true;
      replace(this.readout);
      return;
    }
    this.canvas.hidden = false;
    const free = (segment: SegmentAt) => segment.size - segment.used;
    const found = segmentsAt(device, seq, blocks).sort((a, b) => free(b) - free(a) || a.address - b.address);
    this.reserved = 0;
    this.segments = found.map(segment => {
      const from = this.reserved;
      this.reserved += segment.size;
      return { ...segment, from };
    });
    const sum = (value: (segment: SegmentAt) => number) =>
      this.segments.reduce((all, segment) => all + value(segment), 0);
    const held = this.segments.filter(segment => segment.used > 0 && free(segment) > 0);
    const empty = this.segments.filter(segment => segment.used === 0);
    replace(
      this.about,
      `${format.number(this.segments.length, 'segment')}, ${format.size(this.reserved)} reserved, ` +
        `${format.size(sum(free))} unallocated. `,
      info.rest
        ? 'Blocks that the page does not list are drawn as unallocated. '
        : `${format.size(empty.reduce((all, one) => all + one.size, 0))} can be released: segments without a block. ` +
            `Live blocks keep ${format.size(held.reduce((all, one) => all + free(one), 0))} in ` +
            `${format.number(held.length, 'segment')} from being released. `,
      `To scale: each full row is ${format.size(this.rowBytes())}. `,
      'Segments with the most unallocated memory come first.',
    );
    this.draw();
  }

  /** The bytes of a full row: a power of two, so that the rows are few and the labels are round. */
  private rowBytes(): number {
    return Math.max(MIN_ROW_BYTES, 2 ** Math.floor(Math.log2(Math.max(1, this.reserved) / MIN_ROWS)));
  }

  private rows(): number {
    return Math.max(1, Math.ceil(this.reserved / this.rowBytes()));
  }

  /** The width of a full row in pixels. */
  private width(): number {
    return Math.max(1, this.canvas.clientWidth - LABEL - 2);
  }

  private draw(): void {
    const { device, canvas } = this;
    if (!device || canvas.hidden || canvas.clientWidth === 0) return;
    const rows = this.rows();
    const height = rows * (ROW + GAP);
    const ratio = Math.min(2, devicePixelRatio || 1);
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [Math.round(canvas.clientWidth * ratio), Math.round(height * ratio)];
    const context = canvas.getContext('2d') as CanvasRenderingContext2D;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = '12px system-ui, sans-serif';
    context.textAlign = 'right';
    context.fillStyle = color('mute');
    for (let row = 0; row < rows; row++)
      context.fillText(format.size(row * this.rowBytes()), LABEL - 8, row * (ROW + GAP) + 13);
    const { process } = device;
    for (const segment of this.segments) {
      context.fillStyle = color('free');
      for (const [x, y, wide] of this.pieces(segment.from, segment.size)) context.fillRect(x, y, wide, ROW);
      for (const block of segment.blocks) {
        context.fillStyle = color(
          this.colorOf(process.categories[process.category(device.site[block] as number)]?.name ?? 'unknown'),
        );
        const from = segment.from + (device.address[block] as number) - segment.address;
        for (const [x, y, wide] of this.pieces(from, device.size[block] as number))
          context.fillRect(x, y, wide - (wide > BORDERED ? 1 : 0), ROW);
      }
      this.border(context, this.pieces(segment.from, segment.size));
    }
  }

  /** A border around a segment. It is open where the segment goes on in another row. */
  private border(context: CanvasRenderingContext2D, pieces: [number, number, number][]): void {
    context.strokeStyle = color('mute');
    context.beginPath();
    pieces.forEach(([x, y, wide], at) => {
      if (wide < BORDERED) return;
      for (const edge of [y + 0.5, y + ROW - 0.5]) {
        context.moveTo(x, edge);
        context.lineTo(x + wide, edge);
      }
      const sides = [...(at === 0 ? [x + 0.5] : []), ...(at === pieces.length - 1 ? [x + wide - 0.5] : [])];
      for (const side of sides) {
        context.moveTo(side, y);
        context.lineTo(side, y + ROW);
      }
    });
    context.stroke();
  }

  /** The rectangles of bytes that begin at a place of the map: one in each row. */
  private pieces(from: number, size: number): [x: number, y: number, width: number][] {
    const found: [number, number, number][] = [];
    const [perRow, end] = [this.rowBytes(), from + size];
    const scale = this.width() / perRow;
    for (let at = from; at < end; ) {
      const row = Math.floor(at / perRow);
      const to = Math.min(end, (row + 1) * perRow);
      found.push([LABEL + (at - row * perRow) * scale, row * (ROW + GAP), (to - at) * scale]);
      at = to;
    }
    return found;
  }

  private hover(event: PointerEvent): void {
    const { device } = this;
    const bounds = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - bounds.top) / (ROW + GAP));
    const share = (event.clientX - bounds.left - LABEL) / this.width();
    if (share < 0 || share >= 1) return;
    const place = (row + share) * this.rowBytes();
    const segment = this.segments.find(one => one.from <= place && place < one.from + one.size);
    if (!device || !segment) return;
    const at = segment.address + place - segment.from;
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
