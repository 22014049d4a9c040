/** The line table: functions with their figures, and their source with the figures of each line. */

import type { LinesInfo } from '../data/lines';
import { shortFile } from '../data/model';
import type { FunctionLines, LineRow, LinesReport } from '../data/schema';
import { el, replace } from '../dom';
import * as format from '../format';
import { fillNav, header, type Part } from '../views/header';
import { type SourceColumn, SourceTable } from '../views/lines';
import { SortableTable } from '../views/table';

/** Everything that the page shows, for tests. */
interface Exposed {
  report: LinesReport;
  readyMs: number;
}

declare global {
  interface Window {
    memtraceLines?: Exposed;
  }
}

const PARTS: Part[] = [
  ['functions', 'Functions'],
  ['source', 'Source'],
  ['legend', 'Legend'],
];
/** The number of kinds of blocks that the page shows of one line. */
const LISTED_KINDS = 3;

/** A function on the page. */
interface Shown {
  report: FunctionLines;
  source: SourceTable<LineRow>;
  /** All of its texts in lower case, for the search. */
  text: string;
}

/** Shows the line table that is in `data`. */
export function linesPage(app: HTMLElement, data: Uint8Array): void {
  const { page, lines: report } = JSON.parse(new TextDecoder().decode(data)) as { page: LinesInfo; lines: LinesReport };
  const head = header('memtrace lines', report.run, [page.device]);
  const functions = report.functions.map((one, at) => shownFunction(one, page, report, at));

  const found = el('p', { class: 'note', role: 'status' });
  const table = new SortableTable<Shown>(columns(), 'Functions');
  const source = el(
    'section',
    { class: 'card w12', id: 'source', 'aria-label': 'Source' },
    el('h2', {}, 'Source'),
    functions.map(one => one.source.element),
    el(
      'p',
      { class: 'note spare-note' },
      'A wider page has more figures: Reserved peak, Allocated, Blocks, Times, Backward.',
    ),
  );
  const field = el('input', {
    type: 'search',
    placeholder: 'function, file, code, tensor',
    'aria-label': 'Search the functions and their source',
    oninput: () => search(),
  });
  const search = () => {
    const words = field.value
      .toLowerCase()
      .split(/\s+/)
      .filter(word => word !== '');
    const has = (text: string) => words.every(word => text.includes(word));
    const matching = functions.filter(one => has(one.text));
    let lines = 0;
    for (const one of functions) {
      const isMatch = matching.includes(one);
      one.source.element.hidden = !isMatch;
      lines += one.source.mark(words.length > 0 && isMatch ? line => has(lineText(line, page)) : null);
    }
    table.set(matching);
    replace(
      found,
      words.length === 0
        ? leftOut(report)
        : `${matching.length} of ${format.number(functions.length, 'function')} and ` +
            `${format.number(lines, 'line')} match.`,
    );
  };

  replace(
    app,
    head,
    el(
      'main',
      {},
      el(
        'section',
        { class: 'card w12 verdict', id: 'verdict' },
        el(
          'strong',
          {},
          `Active peak ${format.size(report.active_peak_bytes)}, reserved peak ` +
            `${format.size(report.reserved_peak_bytes)}`,
        ),
        el('p', {}, page.device),
      ),
      el(
        'section',
        { class: 'card w12', id: 'functions', 'aria-label': 'Functions' },
        el('div', { class: 'controls' }, el('h2', {}, 'Functions'), field),
        table.element,
        found,
      ),
      source,
      el(
        'section',
        { class: 'card w12 listing', id: 'legend' },
        el('h2', {}, 'Legend'),
        el(
          'ul',
          {},
          [...page.legend, ...page.notes].map(text => el('li', {}, text)),
        ),
      ),
    ),
  );
  search();
  fillNav(head, PARTS);
  printAll(functions.map(one => one.source.element));
  window.memtraceLines = { report, readyMs: performance.now() };
}

function leftOut(report: LinesReport): string {
  return report.functions_left_out > 0
    ? `${format.number(report.functions_left_out, 'more function')} with lower peaks: use --top, --function or --file.`
    : '';
}

/** Opens all parts of the source while the page is printed. */
function printAll(parts: HTMLDetailsElement[]): void {
  let closed: HTMLDetailsElement[] = [];
  matchMedia('print').addEventListener('change', ({ matches }) => {
    if (matches) closed = parts.filter(part => !part.open);
    for (const part of closed) part.open = matches;
  });
}

function place(one: FunctionLines): string {
  return one.first_line > 0 ? `${one.filename}:${one.first_line}` : one.filename;
}

function columns() {
  const bytes = (title: string, of: (one: FunctionLines) => number, wide: boolean) => ({
    title,
    numeric: true,
    wide,
    key: (row: Shown) => of(row.report),
    cell: (row: Shown) => format.size(of(row.report)),
  });
  return [
    bytes('Active peak', one => one.active_peak_bytes, false),
    bytes('Reserved peak', one => one.reserved_peak_bytes, true),
    bytes('Net', one => one.net_bytes, true),
    bytes('Allocated', one => one.allocated_bytes, false),
    {
      title: 'Function',
      key: (row: Shown) => row.report.function,
      cell: (row: Shown) =>
        el(
          'button',
          {
            type: 'button',
            class: 'link code',
            onclick: () => {
              row.source.element.open = true;
              row.source.element.scrollIntoView({ behavior: 'smooth' });
              row.source.element.querySelector('summary')?.focus({ preventScroll: true });
            },
          },
          row.report.function,
        ),
    },
    {
      title: 'File',
      key: (row: Shown) => place(row.report),
      cell: (row: Shown) => el('code', { title: place(row.report) }, shortFile(place(row.report))),
    },
  ];
}

function shownFunction(one: FunctionLines, page: LinesInfo, report: LinesReport, at: number): Shown {
  const margin = commonMargin(one.lines);
  const title = [
    el('code', {}, one.function),
    ` ${format.size(one.active_peak_bytes)} active peak `,
    el('code', { class: 'mute' }, place(one)),
    one.has_source ? '' : ' (the source is not in the page)',
  ];
  const source = new SourceTable(
    title,
    sourceColumns(one.lines, page, report),
    one.lines,
    line => (line.text ?? '').slice(margin),
    at === 0,
  );
  const text = [one.function, place(one), ...one.lines.map(line => lineText(line, page))].join('\n').toLowerCase();
  return { report: one, source, text };
}

/** The columns of figures that a function has. A column without any text is left out if it is optional. */
function sourceColumns(lines: LineRow[], page: LinesInfo, report: LinesReport): SourceColumn<LineRow>[] {
  const some = (bytes: number | undefined) => (bytes ? format.size(bytes) : '');
  const share = (bytes: number | undefined, most: number) => (bytes === undefined ? 0 : bytes / Math.max(1, most));
  const all: (SourceColumn<LineRow> & { optional?: boolean })[] = [
    {
      head: ['Active peak', 'n'],
      text: ({ figures }) => some(figures?.active_peak_bytes),
      share: ({ figures }) => share(figures?.active_peak_bytes, report.active_peak_bytes),
    },
    {
      head: ['Reserved peak', 'n spare'],
      text: ({ figures }) => some(figures?.reserved_peak_bytes),
      share: ({ figures }) => share(figures?.reserved_peak_bytes, report.reserved_peak_bytes),
    },
    { head: ['Net', 'n'], text: ({ figures }) => (figures ? format.signedSize(figures.net_bytes) : '') },
    { head: ['Allocated', 'n spare'], text: ({ figures }) => (figures ? format.size(figures.allocated_bytes) : '') },
    { head: ['Blocks', 'n spare'], text: ({ figures }) => (figures ? format.count(figures.allocations) : '') },
    {
      head: ['Times', 'n spare'],
      text: ({ figures }) => (figures && figures.times > 0 ? format.count(figures.times) : ''),
    },
    { head: ['Backward', 'n spare'], text: ({ figures }) => some(figures?.backward_bytes), optional: true },
    { head: ['Largest tensor', 'wide kind'], text: tensorText, optional: true },
    { head: ['Custom categories', 'wide kind'], text: line => categoriesText(line, page), optional: true },
    { head: ['Compile contexts', 'wide kind'], text: line => contextsText(line, page), optional: true },
  ];
  return all.filter(column => !column.optional || lines.some(line => column.text(line) !== ''));
}

function tensorText({ largest_tensor: tensor }: LineRow): string {
  if (!tensor) return '';
  const more = tensor.named_blocks > 1 ? `, ${format.count(tensor.named_blocks - 1)} more` : '';
  return `${tensor.name}${tensor.shape ? ` ${tensor.shape}` : ''}${more}`;
}

function kindsText(kinds: [name: string, bytes: number][]): string {
  const names = kinds.slice(0, LISTED_KINDS).map(([name, bytes]) => `${name} ${format.size(bytes)}`);
  if (kinds.length > LISTED_KINDS) names.push(`${kinds.length - LISTED_KINDS} more`);
  return names.join(', ');
}

function categoriesText(line: LineRow, page: LinesInfo): string {
  return kindsText(
    (line.custom_categories ?? []).map(one => [one.custom_category ?? page.no_custom_category, one.bytes]),
  );
}

function contextsText(line: LineRow, page: LinesInfo): string {
  return kindsText((line.compile_contexts ?? []).map(one => [one.compile_context ?? page.not_compiled, one.bytes]));
}

/** What the search finds of a line. */
function lineText(line: LineRow, page: LinesInfo): string {
  return [line.text, tensorText(line), categoriesText(line, page), contextsText(line, page)].join(' ').toLowerCase();
}

/** The common indentation of lines, in characters. */
function commonMargin(lines: LineRow[]): number {
  const texts = lines.map(line => line.text ?? '').filter(text => text.trim() !== '');
  return texts.length === 0 ? 0 : Math.min(...texts.map(text => text.length - text.replace(/^[ \t]+/, '').length));
}
