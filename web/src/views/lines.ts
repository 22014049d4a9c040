/** The program's source with figures per line: each block counts at the innermost line of the program's own code. */

import type { Device } from '../data/model';
import type { State } from '../data/state';
import { el, scrollTable } from '../dom';
import * as format from '../format';

interface Figures {
  peak: number;
  allocated: number;
  blocks: number;
}

/** By file and line: bytes at the peak, bytes and blocks of the whole run. */
function lineFigures(device: Device): Map<string, Map<number, Figures>> {
  const { process } = device;
  const files = new Map<string, Map<number, Figures>>();
  const bySite: (Figures | null | undefined)[] = [];
  const peakSeq = device.pointSeq[device.peak] ?? -1;
  for (let block = 0; block < device.site.length; block++) {
    const site = device.site[block] as number;
    let figures = bySite[site];
    if (figures === undefined) {
      const own = process.own(process.stack(site));
      const frame = own < 0 ? null : process.frame(own);
      figures = null;
      if (frame && !frame.library && !frame.native) {
        let lines = files.get(frame.file);
        if (!lines) files.set(frame.file, (lines = new Map()));
        figures = lines.get(frame.line);
        if (!figures) lines.set(frame.line, (figures = { peak: 0, allocated: 0, blocks: 0 }));
      }
      bySite[site] = figures;
    }
    if (!figures) continue;
    const bytes = device.size[block] as number;
    figures.allocated += bytes;
    figures.blocks += 1;
    if ((device.allocSeq[block] as number) <= peakSeq && peakSeq < (device.freeSeq[block] as number))
      figures.peak += bytes;
  }
  return files;
}

/** A column of figures beside the source. */
export interface SourceColumn<Row> {
  /** Its title and its class. */
  head: readonly [title: string, className: string];
  text: (row: Row) => string;
  /** The length of the bar behind the text: 0 to 1. */
  share?: (row: Row) => number;
}

/** The source of a file or a function with figures at its lines, which can be folded. */
export class SourceTable<Row extends { line: number; figures?: unknown }> {
  readonly element: HTMLDetailsElement;
  private rows: [Row, HTMLElement][] = [];

  constructor(
    title: (Node | string)[],
    columns: SourceColumn<Row>[],
    lines: readonly Row[],
    text: (row: Row) => string,
    isOpen: boolean,
    /** What is shown as the number of a line with figures. */
    number: (row: Row) => Node | string = row => String(row.line),
  ) {
    const shown: HTMLElement[] = [];
    // Texts may be long: they stand behind the code, so that it stays on the screen.
    const isText = ({ head }: SourceColumn<Row>) => head[1].split(' ').includes('kind');
    const [before, behind] = [columns.filter(one => !isText(one)), columns.filter(isText)];
    const hasSource = lines.some(line => text(line) !== '');
    lines.forEach((line, at) => {
      const previous = lines[at - 1];
      if (hasSource && previous && previous.line + 1 < line.line)
        shown.push(el('tr', { class: 'gap' }, el('td', { colspan: columns.length + 2 }, '\u22ef')));
      const cellOf = (column: SourceColumn<Row>) => {
        const cell = el('td', { class: `${column.head[1]}${column.share ? ' share' : ''}` }, column.text(line));
        if (column.share) cell.style.backgroundSize = `${100 * column.share(line)}% 100%`;
        return cell;
      };
      const row = el(
        'tr',
        { class: line.figures ? 'has' : '' },
        before.map(cellOf),
        el('td', { class: 'n' }, line.figures ? number(line) : String(line.line)),
        el('td', { class: 'source' }, el('pre', {}, text(line))),
        behind.map(cellOf),
      );
      this.rows.push([line, row]);
      shown.push(row);
    });
    this.element = el(
      'details',
      { open: isOpen, class: 'file' },
      el('summary', {}, title),
      scrollTable(
        [...before.map(column => column.head), ['Line', 'n'], ['Source'], ...behind.map(column => column.head)],
        shown,
        { class: 'code-table' },
      ),
    );
  }

  /** Marks lines, and returns their number. */
  mark(isMarked: ((row: Row) => boolean) | null): number {
    let marked = 0;
    for (const [line, row] of this.rows) {
      const has = isMarked?.(line) ?? false;
      row.classList.toggle('selected', has);
      if (has) marked += 1;
    }
    return marked;
  }
}

export function linesView(device: Device, state: State): HTMLElement | null {
  const files = lineFigures(device);
  if (files.size === 0) return null;
  const sources = new Map(device.process.sources);
  const peakOf = (lines: Map<number, Figures>) => [...lines.values()].reduce((sum, one) => sum + one.peak, 0);
  const sorted = [...files].sort((a, b) => peakOf(b[1]) - peakOf(a[1]) || (a[0] < b[0] ? -1 : 1));
  const most = Math.max(1, ...sorted.flatMap(([, lines]) => [...lines.values()].map(one => one.peak)));
  interface Line {
    line: number;
    text: string;
    figures?: Figures | undefined;
  }
  const columns: SourceColumn<Line>[] = [
    {
      head: ['At the peak', 'n'],
      text: ({ figures }) => (figures ? format.size(figures.peak) : ''),
      share: ({ figures }) => (figures?.peak ?? 0) / most,
    },
    { head: ['Allocated in all', 'n wide'], text: ({ figures }) => (figures ? format.size(figures.allocated) : '') },
    { head: ['Blocks', 'n wide'], text: ({ figures }) => (figures ? format.count(figures.blocks) : '') },
  ];
  const fileTable = (file: string, figures: Map<number, Figures>, isOpen: boolean) => {
    const ranges = sources.get(file);
    const name = file.split('/').at(-1) ?? file;
    const lines: Line[] = ranges
      ? ranges.flatMap(([from, texts]) =>
          texts.map((text, n) => ({ line: from + n, text, figures: figures.get(from + n) })),
        )
      : [...figures].sort((a, b) => a[0] - b[0]).map(([line, of]) => ({ line, text: '', figures: of }));
    const title = [
      el('code', {}, file),
      ` ${format.size(peakOf(figures))} at the peak`,
      ranges ? '' : ' (the source is not in the page)',
    ];
    const number = ({ line }: Line) =>
      el(
        'button',
        {
          type: 'button',
          class: 'link',
          'aria-label': `Live allocations of line ${line}`,
          onclick: () => {
            state.set({ device, point: device.peak, search: `${name}:${line} ` });
            document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
          },
        },
        String(line),
      );
    return new SourceTable(title, columns, lines, line => line.text, isOpen, number).element;
  };
  return el(
    'section',
    { class: 'card w12', id: 'lines' },
    el('h2', {}, 'Lines'),
    el(
      'p',
      { class: 'note' },
      'Each block counts at the innermost line of the program\u2019s own code in its stack. Blocks of the ' +
        'backward pass count at the forward line.',
      device.info.rest ? ' Only blocks that are listed singly count.' : '',
    ),
    sorted.slice(0, 20).map(([file, figures], at) => fileTable(file, figures, at === 0)),
  );
}
