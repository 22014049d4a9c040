/**
 * What changed between two peaks: sortable tables whose rows have a bar. A chosen row colors its blocks in the
 * timelines.
 */

import { CATEGORY_TEXTS } from '../data/categories';
import type { Change } from '../data/diff';
import type { Device } from '../data/model';
import type { Category, DevicePair, FrameSummary, LineChange, StackChange } from '../data/schema';
import { NO_CUSTOM_CATEGORY } from '../data/series';
import { checkbox, el, replace } from '../dom';
import * as format from '../format';
import { PARTS, STAGES } from './server';
import { swatch } from './swatch';
import { type Column, SortableTable } from './table';

/** The number of rows that a table shows at first. */
const ROWS = 30;
/** The name of what is in use without an event that allocated it. */
export const WITHOUT_EVENT = 'without a recorded event';

/** Run A or run B. */
export type Side = 0 | 1;
type Belongs = (side: Side, device: Device) => (block: number) => boolean;

export interface ChangeRow {
  change: Change;
  label: string;
  /** Makes what the table shows besides the label. */
  more?: () => Node[];
  /** The name of a color of the style sheet. */
  color?: string;
  /** Finds the row's blocks; absent if blocks do not tell. */
  belongs?: Belongs;
}

interface Division {
  name: string;
  noun: string;
  rows: ChangeRow[];
}

/** The devices of both runs, if the page has their data. */
type Devices = readonly [Device, Device] | null;

export class Changes {
  readonly element: HTMLElement;
  private tabs = el('div', { class: 'tabs', role: 'tablist' });
  private about = el('p', { class: 'note' });
  private moved = el('p', { class: 'note' });
  private table: SortableTable<ChangeRow>;
  private divisions: Division[] = [];
  private shown = 'Line';
  private withNoise = false;
  private noise: HTMLElement;
  private pair: DevicePair | null = null;
  private chosen: ChangeRow | null = null;

  constructor(private onchoose: (row: ChangeRow | null) => void) {
    this.table = new SortableTable<ChangeRow>(this.columns([]), 'Changes', ROWS);
    this.noise = checkbox('Also changes within noise', false, all => {
      this.withNoise = all;
      this.show();
    });
    this.element = el(
      'section',
      { class: 'card w12', id: 'changes', 'aria-label': 'What changed' },
      el('div', { class: 'controls' }, el('h2', {}, 'What changed between the peaks'), this.tabs, this.noise),
      this.about,
      this.table.element,
      this.moved,
    );
  }

  set(pair: DevicePair, devices: Devices, moved: string | null): void {
    this.pair = pair;
    this.divisions = divisionsOf(pair, devices).filter(one => one.rows.length > 0);
    replace(this.moved, moved ?? '');
    this.mark(null);
    this.show();
  }

  /** Marks the chosen row. */
  mark(row: ChangeRow | null): void {
    this.chosen = row;
    const rows = this.divisions.flatMap(one => one.rows);
    for (const button of this.table.element.querySelectorAll<HTMLElement>('button[data-row]')) {
      const isChosen = row !== null && rows[Number(button.dataset.row)] === row;
      button.setAttribute('aria-pressed', String(isChosen));
      button.closest('tr')?.classList.toggle('selected', isChosen);
    }
  }

  private show(): void {
    const { pair } = this;
    if (!pair) return;
    const division = this.divisions.find(one => one.name === this.shown) ?? this.divisions[0];
    replace(
      this.tabs,
      this.divisions.map(one =>
        el(
          'button',
          {
            type: 'button',
            role: 'tab',
            'aria-selected': one === division ? 'true' : 'false',
            onclick: () => {
              this.shown = one.name;
              this.show();
            },
          },
          one.name,
        ),
      ),
    );
    const changed = (division?.rows ?? []).filter(row => row.change.difference_bytes !== 0);
    const shown = this.withNoise
      ? changed
      : changed.filter(row => Math.abs(row.change.difference_bytes) > pair.noise_bytes);
    const sum = (rows: ChangeRow[]) => rows.reduce((bytes, row) => bytes + row.change.difference_bytes, 0);
    const left = changed.filter(row => !shown.includes(row));
    replace(
      this.about,
      `The differences by ${division?.noun ?? 'category'} add up to ${format.signedSize(pair.difference_bytes)}. `,
      left.length > 0
        ? `${format.number(left.length, 'change')} of at most ${format.size(pair.noise_bytes)} ` +
            `(${format.signedSize(sum(left))} in all) ${left.length === 1 ? 'is' : 'are'} within noise and not shown. `
        : '',
      division?.rows.some(row => row.belongs) ? 'Choose a row to color its blocks in both timelines.' : '',
    );
    this.table.set(shown, this.columns(shown));
    this.mark(this.chosen);
  }

  private columns(rows: ChangeRow[]): Column<ChangeRow>[] {
    const most = Math.max(1, ...rows.map(row => Math.abs(row.change.difference_bytes)));
    const all = this.divisions.flatMap(one => one.rows);
    const division = this.divisions.find(one => one.name === this.shown) ?? this.divisions[0];
    const blocks = ({ a_blocks, b_blocks }: Change) =>
      a_blocks === b_blocks ? format.count(a_blocks) : `${format.count(a_blocks)} \u2192 ${format.count(b_blocks)}`;
    return [
      {
        title: 'Difference',
        numeric: true,
        key: row => Math.abs(row.change.difference_bytes),
        cell: row => format.signedSize(row.change.difference_bytes),
      },
      {
        title: 'Less or more',
        numeric: true,
        key: row => row.change.difference_bytes,
        cell: row => bar(row.change.difference_bytes / most),
      },
      { title: 'A', numeric: true, key: row => row.change.a_bytes, cell: row => format.size(row.change.a_bytes) },
      { title: 'B', numeric: true, key: row => row.change.b_bytes, cell: row => format.size(row.change.b_bytes) },
      {
        title: 'Blocks',
        numeric: true,
        wide: true,
        key: row => row.change.b_blocks - row.change.a_blocks,
        cell: row => blocks(row.change),
      },
      { title: division?.name ?? '', key: row => row.label, cell: row => this.label(row, all.indexOf(row)) },
    ];
  }

  private label(row: ChangeRow, number: number): Node {
    const text = row.color ? swatch(row.color, row.label) : row.label;
    const label = row.belongs
      ? el(
          'button',
          {
            type: 'button',
            class: 'link',
            'data-row': number,
            'aria-pressed': 'false',
            onclick: () => this.onchoose(this.chosen === row ? null : row),
          },
          text,
        )
      : el('span', {}, text);
    return el('div', {}, label, row.more?.() ?? []);
  }
}

/** A bar from the middle: to the left for less, to the right for more. */
function bar(share: number): HTMLElement {
  const part = el('i', { class: share < 0 ? 'less' : '' });
  part.style.width = `${50 * Math.abs(share)}%`;
  part.style.left = share < 0 ? `${50 * (1 + share)}%` : '50%';
  return el('div', { class: 'change' }, part);
}

function divisionsOf(pair: DevicePair, devices: Devices): Division[] {
  const plural = (name: Category | undefined) => (name === undefined ? WITHOUT_EVENT : CATEGORY_TEXTS[name]);
  const of = (belongs: Belongs | undefined) => (devices && belongs ? { belongs } : {});
  return [
    {
      name: 'Part',
      noun: 'part of the server',
      rows: (pair.by_server_part ?? []).map(row => ({
        change: row,
        label: row.part === undefined ? WITHOUT_EVENT : PARTS[row.part],
      })),
    },
    {
      name: 'Stage',
      noun: 'stage of allocation',
      rows: (pair.by_stage ?? []).map(row => ({
        change: row,
        label: row.stage === undefined ? 'in no stage' : STAGES[row.stage],
      })),
    },
    {
      name: 'Category',
      noun: 'category',
      rows: pair.by_category.map(row => ({
        change: row,
        label: plural(row.category),
        ...(row.category === undefined ? {} : { color: `category-${row.category}` }),
        ...of(
          row.category === undefined ? undefined : bySite((device, site) => categoryOf(device, site) === row.category),
        ),
      })),
    },
    {
      name: 'Custom category',
      noun: 'custom category',
      rows: (pair.by_custom_category ?? []).map(row => ({
        change: row,
        label: row.custom_category ?? NO_CUSTOM_CATEGORY,
      })),
    },
    {
      name: 'Phase',
      noun: 'phase of allocation',
      rows: pair.by_phase.map(row => ({
        change: row,
        label: row.phase ?? WITHOUT_EVENT,
        ...(row.phase === undefined ? {} : { color: `phase-${row.phase}` }),
        ...of(
          row.phase === undefined
            ? undefined
            : bySite((device, site) => device.process.phases[device.process.phase(site)] === row.phase),
        ),
      })),
    },
    {
      name: 'Line',
      noun: 'line and category',
      rows: pair.by_line.map(row => ({
        change: row,
        label: row.location === '' ? plural(row.category) : `${plural(row.category)} at ${row.location}`,
        ...(row.category === undefined ? {} : { color: `category-${row.category}` }),
        more: () => sourceOf(row, devices),
        ...of(
          row.category === undefined
            ? undefined
            : bySite(
                (device, site, side) => categoryOf(device, site) === row.category && isLine(row, device, site, side),
              ),
        ),
      })),
    },
    {
      name: 'Stack',
      noun: 'call stack, category and phase',
      rows: pair.by_stack.map(row => ({
        change: row,
        label: [`${plural(row.category)}${row.location === '' ? '' : ` at ${row.location}`}`, row.phase ?? '']
          .filter(text => text !== '')
          .join(', '),
        ...(row.category === undefined ? {} : { color: `category-${row.category}` }),
        more: () => framesOf(row, devices),
      })),
    },
    {
      name: 'Module',
      noun: 'module, without the modules inside it',
      rows: pair.by_module.map(row => ({
        change: row,
        label: row.path === undefined ? 'in no module' : row.path || 'the model itself',
        ...of((_, device) => block => isModule(device.process.module(device, block), row.path)),
      })),
    },
  ];
}

/** Blocks by what distinguishes their sites. */
function bySite(test: (device: Device, site: number, side: Side) => boolean): Belongs {
  return (side, device) => {
    const known = new Int8Array(device.process.sites).fill(-1);
    return block => {
      const site = device.site[block] as number;
      if (known[site] === -1) known[site] = test(device, site, side) ? 1 : 0;
      return known[site] === 1;
    };
  };
}

/** Whether a module of the data is the one of a path; an empty path is a model itself. */
function isModule(module: string | null, path: string | undefined): boolean {
  if (module === null || path === undefined) return module === null && path === undefined;
  return path === '' ? module.startsWith('/') : module === path;
}

function categoryOf(device: Device, site: number): string | undefined {
  return device.process.categories[device.process.category(site)]?.name;
}

function isLine(row: LineChange, device: Device, site: number, side: Side): boolean {
  const { process } = device;
  const own = process.own(process.stack(site));
  const wanted = side === 0 ? row.a_frame : row.b_frame;
  if (own < 0) return !row.a_frame && !row.b_frame && (process.node(site) ?? '') === row.location;
  const frame = process.frame(own);
  return (
    wanted !== undefined && frame.file === wanted.filename && frame.line === wanted.line && frame.name === wanted.name
  );
}

/** The text of a line: of both runs where it differs. */
function sourceOf(row: LineChange, devices: Devices): Node[] {
  if (!devices) return [];
  const text = (device: Device, frame: FrameSummary | undefined) =>
    frame && !frame.native ? device.process.sourceLine(frame.filename, frame.line) : null;
  const [a, b] = [text(devices[0], row.a_frame), text(devices[1], row.b_frame)];
  if (a !== null && b !== null && a !== b) return [el('pre', { class: 'source' }, `A: ${a}\nB: ${b}`)];
  const found = b ?? a;
  return found === null ? [] : [el('pre', { class: 'source' }, found)];
}

/** The frames of a stack, on request. */
function framesOf(row: StackChange, devices: Devices): Node[] {
  if (row.frames.length === 0) return [];
  const details = el(
    'details',
    { class: 'stack' },
    el('summary', { class: 'code' }, format.number(row.frames.length, 'frame')),
  );
  details.addEventListener('toggle', () => {
    if (!details.open || details.childElementCount > 1) return;
    const source = (frame: FrameSummary) =>
      frame.native
        ? null
        : (devices?.[1].process.sourceLine(frame.filename, frame.line) ??
          devices?.[0].process.sourceLine(frame.filename, frame.line) ??
          null);
    const item = (frame: FrameSummary) => {
      const text = source(frame);
      return el(
        'li',
        {},
        el(
          'code',
          {},
          frame.line > 0 ? `${frame.filename}:${frame.line} ${frame.name}` : `${frame.filename} ${frame.name}`,
        ),
        text === null ? null : el('pre', {}, text),
      );
    };
    details.append(el('ol', {}, row.frames.map(item)));
  });
  return [details];
}
