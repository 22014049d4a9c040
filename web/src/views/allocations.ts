/** The live allocations at a point, or the differences between two points: table, icicle graph, memory map. */

import type { Device } from '../data/model';
import { moduleText, shortFile } from '../data/model';
import { NO_CUSTOM_CATEGORY } from '../data/series';
import type { State } from '../data/state';
import { checkbox, el, replace } from '../dom';
import * as format from '../format';
import { FlameGraph } from './flame';
import { MemoryMap } from './memory_map';
import { swatch } from './swatch';
import { type Column, SortableTable } from './table';

interface Row {
  /** The block, or the largest of the group. */
  block: number;
  blocks: number;
  bytes: number;
  /** 1 for a block that is new since the other point, -1 for one that is gone, 0 without another point. */
  change: number;
  names: string;
  /** The module, or the pattern of those of all blocks: `layers.*.mlp`. */
  module: string;
}

/** The components that two paths share, with `*` for each other one; empty for paths that begin differently. */
function commonPattern(one: string, other: string): string {
  if (one === other) return one;
  const [first, second] = [one.split('.'), other.split('.')];
  if (first[0] !== second[0]) return '';
  if (first.length === second.length) return first.map((part, at) => (part === second[at] ? part : '*')).join('.');
  const end = first.findIndex((part, at) => part !== second[at]);
  return [...first.slice(0, end < 0 ? first.length : end), '*'].join('.');
}

export class Allocations {
  readonly element: HTMLElement;
  private title = el('h2', {}, 'Live allocations');
  private about = el('p', { class: 'note' });
  private views: Record<string, HTMLElement>;
  private table: SortableTable<Row>;
  private flame: FlameGraph;
  private map: MemoryMap;
  private tabs = el('div', { class: 'tabs', role: 'tablist' });
  private view = 'table';
  private grouped = true;
  private searchField = el('input', {
    type: 'search',
    placeholder: 'name, module, category, line',
    'aria-label': 'Search the live allocations',
    oninput: () => this.state.set({ search: this.searchField.value }),
  });
  private drop = el('button', { type: 'button', onclick: () => this.state.set({ base: -1 }) }, 'End the comparison');
  private texts = new Map<number, string>();
  private textDevice: Device | null = null;

  constructor(
    private state: State,
    private positionText: (point: number) => string,
    /** The name of the run, on a page about several. */
    private runName: () => string = () => '',
  ) {
    this.table = new SortableTable<Row>(this.columns(), 'Live allocations');
    const colorOf = (category: string) => `category-${category}`;
    this.flame = new FlameGraph(colorOf);
    this.map = new MemoryMap(colorOf, block => this.describe(block));
    this.views = {
      table: el(
        'div',
        {},
        el(
          'div',
          { class: 'controls' },
          checkbox('Group blocks of one line and category', true, grouped => {
            this.grouped = grouped;
            this.show();
          }),
        ),
        this.table.element,
      ),
      flame: this.flame.element,
      map: this.map.element,
    };
    this.element = el(
      'section',
      { class: 'card w12', id: 'allocations', 'aria-label': 'Live allocations' },
      el('div', { class: 'controls' }, this.title, this.tabs, this.searchField, this.drop),
      this.about,
      ...Object.values(this.views),
    );
    state.listen(changed => {
      if (changed.search !== undefined && this.searchField.value !== changed.search)
        this.searchField.value = changed.search;
      if (changed.point !== undefined || changed.base !== undefined || changed.device || changed.search !== undefined)
        this.show();
    });
    this.show();
  }

  private get device(): Device {
    return this.state.now.device;
  }

  /** All texts of a block in lower case, for the search. Blocks of one site and tensor have one text. */
  private text(block: number): string {
    const { device } = this;
    if (this.textDevice !== device) [this.textDevice, this.texts] = [device, new Map()];
    const key = (device.site[block] as number) * 2 ** 24 + (device.tensor[block] as number);
    let text = this.texts.get(key);
    if (text === undefined) {
      const { process } = device;
      const site = device.site[block] as number;
      const tensor = process.tensor(device.tensor[block] as number);
      const stack = process.frames(process.stack(site)).map(number => process.frame(number));
      text = [
        tensor?.name,
        tensor?.shape,
        moduleText(process.module(device, block) ?? ''),
        process.categoryText(site),
        process.customCategories.length > 0 ? (process.custom(site) ?? NO_CUSTOM_CATEGORY) : '',
        process.phases[process.phase(site)],
        process.node(site),
        ...stack.map(frame => `${shortFile(frame.file)}:${frame.line} ${frame.name}`),
      ]
        .join(' ')
        .toLowerCase();
      this.texts.set(key, text);
    }
    return text;
  }

  private describe(block: number): string {
    const { device } = this;
    const { process } = device;
    const site = device.site[block] as number;
    const tensor = process.tensor(device.tensor[block] as number);
    const parts = [
      tensor?.name ?? process.categoryText(site),
      tensor?.shape,
      format.size(device.size[block] as number),
      process.location(process.stack(site)),
    ];
    return parts.filter(part => part).join(', ');
  }

  private show(): void {
    const { device, point, base, search } = this.state.now;
    this.drop.hidden = base < 0;
    const seq = device.pointSeq[point] ?? -1;
    const live = device.points > 0 ? device.live(point) : [];
    const words = search
      .toLowerCase()
      .split(/\s+/)
      .filter(word => word !== '');
    const matches = (block: number) => words.every(word => this.text(block).includes(word));
    let rows: Row[];
    const sum = (blocks: number[]) => blocks.reduce((bytes, block) => bytes + (device.size[block] as number), 0);
    if (base >= 0) {
      const before = device.live(base);
      const [old, now] = [new Set(before), new Set(live)];
      const added = live.filter(block => !old.has(block));
      const gone = before.filter(block => !now.has(block));
      rows = [...this.rows(added.filter(matches), 1), ...this.rows(gone.filter(matches), -1)];
      replace(this.title, `Changes between two points${this.ofRun()}`);
      const [low, high] = [device.total[base] as number, device.total[point] as number];
      replace(
        this.about,
        `From ${this.positionText(base)} (${format.size(low)}, event ` +
          `${format.count(device.pointSeq[base] as number)}) to ${this.positionText(point)} ` +
          `(${format.size(high)}, event ${format.count(seq)}): ${format.signedSize(high - low)}. ` +
          `${format.number(added.length, 'block')} more (${format.size(sum(added))}), ` +
          `${format.number(gone.length, 'block')} fewer (${format.size(sum(gone))}).`,
        device.info.rest ? ' Blocks that are not listed singly are left out.' : '',
      );
      this.flame.set(device, added.filter(matches), search);
    } else {
      const found = words.length > 0 ? live.filter(matches) : live;
      rows = this.rows(found, 0);
      replace(this.title, `Live allocations${this.ofRun()}`);
      const total = device.total[point] ?? 0;
      const rest = device.restCount ? (device.restCount[point] ?? 0) : 0;
      replace(
        this.about,
        el('b', {}, `${format.size(total)} at event ${format.count(Math.max(0, seq))}`),
        ` (${[this.positionText(point), point === device.peak && 'the peak'].filter(Boolean).join(', ')}): `,
        `${format.number(live.length, 'block')} listed`,
        rest > 0
          ? `, and ${format.number(rest, 'smaller or shorter-lived allocation')}, ` +
              `${format.size(total - sum(live))} in all`
          : '',
        words.length > 0 ? `. ${format.number(found.length, 'block')} (${format.size(sum(found))}) match.` : '.',
        ' Click the timeline for another point; Shift and click to compare two.',
      );
      this.flame.set(device, live, search);
    }
    this.table.set(rows, this.columns());
    this.map.set(device, seq, live);
    const names: Record<string, string> = { table: 'Table', flame: 'Flame graph', map: 'Memory map' };
    replace(
      this.tabs,
      Object.keys(this.views).map(name =>
        el(
          'button',
          {
            type: 'button',
            role: 'tab',
            'aria-selected': name === this.view ? 'true' : 'false',
            onclick: () => this.choose(name),
          },
          names[name] as string,
        ),
      ),
    );
    for (const [name, view] of Object.entries(this.views)) view.hidden = name !== this.view;
  }

  private ofRun(): string {
    const name = this.runName();
    return name === '' ? '' : ` of ${name}`;
  }

  private choose(view: string): void {
    this.view = view;
    this.show();
  }

  private rows(blocks: number[], change: number): Row[] {
    const { device } = this;
    const { process } = device;
    if (!this.grouped) {
      return blocks.map(block => ({
        block,
        blocks: 1,
        bytes: device.size[block] as number,
        change,
        names: this.name(block),
        module: process.module(device, block) ?? '',
      }));
    }
    const groups = new Map<string, Row & { largest: number; all: Set<string> }>();
    for (const block of blocks) {
      const site = device.site[block] as number;
      const key =
        `${process.categoryText(site)} ${process.custom(site) ?? ''} ` +
        `${process.own(process.stack(site))} ${process.node(site) ?? ''}`;
      const bytes = device.size[block] as number;
      let row = groups.get(key);
      if (!row)
        groups.set(
          key,
          (row = { block, blocks: 0, bytes: 0, change, names: '', module: '', largest: 0, all: new Set() }),
        );
      const module = process.module(device, block) ?? '';
      row.module = row.blocks === 0 ? module : commonPattern(row.module, module);
      row.blocks += 1;
      row.bytes += bytes;
      if (bytes > row.largest) [row.largest, row.block] = [bytes, block];
      if (row.all.size < 4) row.all.add(this.name(block));
    }
    for (const row of groups.values()) {
      const names = [...row.all].filter(name => name !== '');
      row.names = row.blocks === 1 ? this.name(row.block) : names.length > 1 ? `${names[0]}, ...` : (names[0] ?? '');
    }
    return [...groups.values()];
  }

  private name(block: number): string {
    const tensor = this.device.process.tensor(this.device.tensor[block] as number);
    return tensor ? `${tensor.name}${tensor.shape ? `  ${tensor.shape}` : ''}` : '';
  }

  private columns(): Column<Row>[] {
    const { device, base, point } = this.state.now;
    const { process } = device;
    const site = (row: Row) => device.site[row.block] as number;
    const category = (row: Row) => process.categories[process.category(site(row))];
    const module = (row: Row) => moduleText(row.module);
    const location = (row: Row) => {
      const text = process.location(process.stack(site(row)));
      const node = process.node(site(row));
      return node ? `${node} of ${text}` : text;
    };
    const custom = (row: Row) => process.custom(site(row)) ?? NO_CUSTOM_CATEGORY;
    const total = Math.max(1, device.total[point] ?? 1);
    const now = device.pointTime[point] ?? 0;
    const age = (row: Row) => now - device.timeOf(device.allocSeq[row.block] as number);
    const columns: Column<Row>[] = [
      {
        title: base >= 0 ? 'Change' : 'Size',
        numeric: true,
        key: row => (row.change === 0 ? row.bytes : Math.abs(row.bytes)),
        cell: row => (row.change === 0 ? format.size(row.bytes) : format.signedSize(row.change * row.bytes)),
      },
    ];
    if (base < 0)
      columns.push({
        title: 'Share',
        numeric: true,
        wide: true,
        key: row => row.bytes,
        cell: row => format.share(row.bytes, total),
      });
    if (this.grouped)
      columns.push({ title: 'Blocks', numeric: true, key: row => row.blocks, cell: row => format.count(row.blocks) });
    columns.push(
      {
        title: 'Category',
        key: row => process.categoryText(site(row)),
        cell: row => swatch(`category-${category(row)?.name ?? 'unknown'}`, process.categoryText(site(row))),
      },
      ...(process.customCategories.length > 0 ? [{ title: 'Custom category', key: custom, cell: custom }] : []),
      { title: 'Tensor', below: true, key: row => row.names, cell: row => row.names },
      { title: 'Module', wide: true, key: module, cell: module },
      { title: 'Allocated at', below: true, key: location, cell: row => this.stack(row, location(row)) },
      {
        title: 'Phase',
        wide: true,
        key: row => process.phases[process.phase(site(row))] ?? '',
        cell: row => el('span', { class: 'labeled' }, process.phases[process.phase(site(row))] ?? ''),
      },
    );
    if (!this.grouped) {
      columns.push(
        {
          title: 'Event',
          numeric: true,
          wide: true,
          key: row => device.allocSeq[row.block] as number,
          cell: row => format.count(device.allocSeq[row.block] as number),
        },
        {
          title: device.info.rest ? 'Age (about)' : 'Age',
          numeric: true,
          wide: true,
          key: age,
          cell: row => format.duration(Math.max(0, age(row))),
        },
      );
    }
    return columns;
  }

  /** The location; its stack on request. */
  private stack(row: Row, location: string): Node {
    const { process } = this.device;
    const stack = process.stack(this.device.site[row.block] as number);
    if (stack === 0) return el('span', { class: 'mute' }, location || 'no stack');
    const details = el('details', { class: 'stack' }, el('summary', { class: 'code' }, location || 'no stack'));
    details.addEventListener('toggle', () => {
      if (!details.open || details.childElementCount > 1) return;
      const frames = process.frames(stack).map(number => process.frame(number));
      details.append(
        el(
          'ol',
          {},
          frames.map(frame => {
            const source = frame.library ? null : process.sourceLine(frame.file, frame.line);
            return el(
              'li',
              { class: frame.library ? 'mute' : '' },
              el('code', {}, `${frame.file}:${frame.line} ${frame.name}`),
              source ? el('pre', {}, source) : null,
            );
          }),
        ),
      );
    });
    return details;
  }
}
