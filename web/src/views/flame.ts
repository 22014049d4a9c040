/** An icicle graph of bytes by call stack, outermost frames on top. */

import { type Device, type Frame, frameText } from '../data/model';
import { checkbox, el, replace } from '../dom';
import * as format from '../format';

interface Node {
  /** A frame's number, `~n` for `n` folded frames of libraries, or a text for other nodes. */
  key: string;
  label: string;
  title: string;
  library: boolean;
  bytes: number;
  blocks: number;
  /** Bytes by category. */
  categories: Map<number, number>;
  children: Map<string, Node>;
}

const ROW = 20;
/** Parts narrower than this are not drawn, in CSS pixels. */
const NARROWEST = 2;
/** The maximum number of rows. */
const ROWS = 60;

function node(key: string, label: string, title: string, library: boolean): Node {
  return { key, label, title, library, bytes: 0, blocks: 0, categories: new Map(), children: new Map() };
}

export class FlameGraph {
  readonly element: HTMLElement;
  private picture = el('div', { class: 'flame', role: 'tree', 'aria-label': 'Icicle graph: bytes by call stack' });
  private readout = el('div', { class: 'readout', role: 'status' });
  private folds = true;
  private root = node('', 'all', 'all', false);
  private zoom: Node[] = [];
  private search = '';
  private device: Device | null = null;
  private blocks: number[] = [];

  constructor(private colorOf: (category: string) => string) {
    this.element = el(
      'div',
      {},
      el(
        'div',
        { class: 'controls' },
        checkbox('Fold frames of libraries', true, folds => {
          this.folds = folds;
          if (this.device) this.set(this.device, this.blocks, this.search);
        }),
      ),
      this.picture,
      this.readout,
    );
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  set(device: Device, blocks: number[], search: string): void {
    [this.device, this.blocks, this.search, this.zoom] = [device, blocks, search.toLowerCase(), []];
    this.root = this.tree(device, blocks);
    this.draw();
  }

  private tree(device: Device, blocks: number[]): Node {
    const { process } = device;
    const root = node('', 'all live allocations', 'all live allocations', false);
    const paths = new Map<number, Node[]>();
    const frames = new Map<number, Frame>();
    const frameOf = (number: number) => {
      let frame = frames.get(number);
      if (!frame) frames.set(number, (frame = process.frame(number)));
      return frame;
    };
    for (const block of blocks) {
      const site = device.site[block] as number;
      let path = paths.get(site);
      if (!path) {
        path = [root];
        const into = (key: string, label: string, title: string, library: boolean) => {
          const parent = path?.at(-1) as Node;
          let child = parent.children.get(key);
          if (!child) parent.children.set(key, (child = node(key, label, title, library)));
          path?.push(child);
        };
        const numbers = process.frames(process.stack(site)).reverse();
        for (let at = 0; at < numbers.length; ) {
          const frame = frameOf(numbers[at] as number);
          let end = at + 1;
          if (this.folds && frame.library) {
            while (end < numbers.length && frameOf(numbers[end] as number).library) end += 1;
          }
          if (end - at > 1) {
            // The innermost frame of a library says most.
            const last = frameOf(numbers[end - 1] as number);
            into(
              `~${numbers[end - 1]}`,
              `${frameText(last)} (+${end - at - 1})`,
              `${end - at} frames of libraries, innermost ${frameText(last)}`,
              true,
            );
          } else {
            into(
              `${numbers[at]}`,
              frameText(frame),
              `${frame.name}\n${frame.file}:${frame.line}`,
              frame.library || frame.native,
            );
          }
          at = end;
        }
        const autograd = process.node(site);
        if (autograd) into(`node ${autograd}`, autograd, `autograd node ${autograd}, made by the call above`, true);
        if (path.length === 1) into('none', 'no stack', 'The recording has no stack of these blocks', true);
        paths.set(site, path);
      }
      const category = process.category(site);
      const bytes = device.size[block] as number;
      for (const one of path) {
        one.bytes += bytes;
        one.blocks += 1;
        one.categories.set(category, (one.categories.get(category) ?? 0) + bytes);
      }
    }
    return root;
  }

  private draw(): void {
    const width = this.picture.clientWidth;
    const { device } = this;
    if (width === 0 || !device) return;
    const { process } = device;
    const top = this.zoom.at(-1) ?? this.root;
    const parts: HTMLElement[] = [];
    let found = 0;
    let deepest = 0;
    const put = (one: Node, x: number, wide: number, row: number, matched: boolean) => {
      if (wide < NARROWEST || row >= ROWS) return;
      deepest = Math.max(deepest, row);
      const matches =
        this.search !== '' && one !== this.root && `${one.label} ${one.title}`.toLowerCase().includes(this.search);
      if (matches && !matched) found += one.bytes;
      const largest = [...one.categories].reduce((a, b) => (b[1] > a[1] ? b : a), [0, -1]);
      const share = format.share(one.bytes, this.root.bytes);
      const text = `${one.label}: ${format.size(one.bytes)}, ${share}, ${format.number(one.blocks, 'block')}`;
      const part = el(
        'button',
        {
          type: 'button',
          role: 'treeitem',
          'aria-level': row + 1,
          'aria-label': text,
          title: `${one.title}\n${format.size(one.bytes)} (${share}) in ${format.number(one.blocks, 'block')}`,
          class: `${one.library ? 'library' : ''} ${matches ? 'match' : ''}`,
          onclick: () => this.zoomInto(one),
          onfocus: () => replace(this.readout, text),
          onpointerenter: () => replace(this.readout, text),
        },
        wide > 30 ? one.label : '',
      );
      part.style.left = `${x}px`;
      part.style.top = `${row * (ROW + 1)}px`;
      part.style.width = `${Math.max(1, wide - 1)}px`;
      part.style.setProperty('--part', `var(--${this.colorOf(process.categories[largest[0]]?.name ?? 'unknown')})`);
      parts.push(part);
      let at = x;
      const children = [...one.children.values()].sort((a, b) => b.bytes - a.bytes || (a.key < b.key ? -1 : 1));
      for (const child of children) {
        const part = (wide * child.bytes) / Math.max(1, one.bytes);
        put(child, at, part, row + 1, matched || matches);
        at += part;
      }
    };
    this.zoom.slice(0, -1).forEach((one, row) => put({ ...one, children: new Map() }, 0, width, row, true));
    put(top, 0, width, Math.max(0, this.zoom.length - 1), false);
    this.picture.style.height = `${(deepest + 1) * (ROW + 1)}px`;
    replace(this.picture, parts);
    const searched =
      this.search === ''
        ? ''
        : `${format.size(found)} (${format.share(found, this.root.bytes)}) match "${this.search}". `;
    replace(
      this.readout,
      searched,
      this.zoom.length > 0
        ? 'Select the top row to zoom out.'
        : 'Select a part to zoom in. The color is the largest category.',
    );
  }

  private zoomInto(one: Node): void {
    const path = (from: Node): Node[] | null => {
      if (from === one || (from.key === one.key && from.title === one.title && from.bytes === one.bytes)) return [from];
      for (const child of from.children.values()) {
        const rest = path(child);
        if (rest) return [from, ...rest];
      }
      return null;
    };
    const found = path(this.root) ?? [];
    this.zoom =
      found.length <= 1 || (found.length === this.zoom.length && found.at(-1) === this.zoom.at(-1)) ? [] : found;
    this.draw();
  }
}
