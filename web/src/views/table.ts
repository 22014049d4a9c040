/** A sortable table that shows its first rows; more on request. */

import { el, replace, stackRows } from '../dom';
import * as format from '../format';

export interface Column<Row> {
  title: string;
  /** What rows are sorted by: numbers from large to small, texts in order. */
  key: (row: Row) => number | string;
  cell: (row: Row) => Node | string;
  numeric?: boolean;
  /** Not shown on narrow screens. */
  wide?: boolean;
  /** Below the other cells of its row on narrow screens. */
  below?: boolean;
}

const PAGE = 100;

export class SortableTable<Row> {
  readonly element: HTMLElement;
  private table: HTMLElement;
  private head = el('tr', {});
  private body = el('tbody', {});
  private more = el('button', { type: 'button', onclick: () => this.show(this.shown + 10 * this.page) });
  private rows: Row[] = [];
  private shown = 0;
  private by = 0;
  private reversed = false;

  constructor(
    private columns: Column<Row>[],
    label: string,
    /** The number of rows that it shows at first. */
    private page = PAGE,
  ) {
    this.table = el('table', { 'aria-label': label }, el('thead', {}, this.head), this.body);
    this.element = el('div', { class: 'scroll' }, this.table, this.more);
  }

  set(rows: Row[], columns = this.columns): void {
    if (columns !== this.columns) [this.columns, this.by, this.reversed] = [columns, 0, false];
    this.rows = rows;
    this.sort();
  }

  private sort(): void {
    stackRows(this.table, this.columns.map(classes));
    const column = this.columns[this.by] as Column<Row>;
    const keyed = this.rows.map((row, at) => ({ row, at, key: column.key(row) }));
    keyed.sort((a, b) => {
      const order =
        typeof a.key === 'number'
          ? (b.key as number) - a.key
          : a.key < (b.key as string)
            ? -1
            : a.key > (b.key as string)
              ? 1
              : 0;
      return (this.reversed ? -order : order) || a.at - b.at;
    });
    this.rows = keyed.map(({ row }) => row);
    replace(
      this.head,
      this.columns.map((one, at) => {
        const sorted =
          at === this.by ? (this.reversed !== (one.numeric === true) ? 'descending' : 'ascending') : 'none';
        const choose = () => {
          [this.reversed, this.by] = [at === this.by && !this.reversed, at];
          this.sort();
        };
        return el(
          'th',
          { scope: 'col', class: classes(one), 'aria-sort': sorted },
          el(
            'button',
            { type: 'button', onclick: choose },
            one.title,
            at === this.by ? (sorted === 'descending' ? ' \u2193' : ' \u2191') : '',
          ),
        );
      }),
    );
    this.show(this.page);
  }

  private show(count: number): void {
    this.shown = count;
    replace(
      this.body,
      this.rows.slice(0, count).map(row =>
        el(
          'tr',
          {},
          this.columns.map(column =>
            el('td', { class: classes(column), 'data-title': column.title }, column.cell(row)),
          ),
        ),
      ),
    );
    this.more.hidden = this.rows.length <= count;
    replace(this.more, `Show more (${format.count(this.rows.length - count)} rows are left)`);
  }
}

function classes<Row>(column: Column<Row>): string {
  return [column.numeric ? 'n' : '', column.wide ? 'wide' : '', column.below ? 'below' : '']
    .filter(one => one !== '')
    .join(' ');
}
