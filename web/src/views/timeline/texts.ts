/** The texts of a timeline: the figures at the cursor, the legend with them, and what is drawn. */

import { valueAt } from '../../data/extremes';
import type { RankTotals } from '../../data/rank_totals';
import { el, replace } from '../../dom';
import * as format from '../../format';
import { square } from '../swatch';
import { type Content, positionText } from './content';
import type { LineName, Lines } from './lines';
import { selectInSum } from './selection';
import { rangeText } from './windows';

export class Texts {
  readonly readout = el('div', { class: 'readout', role: 'status', 'aria-live': 'polite' });
  readonly legend = el('div', { class: 'legend' });
  readonly note = el('p', { class: 'note' });

  constructor(
    private content: Content,
    private lines: Lines,
    /** Is called after a line was shown or hidden. */
    private onToggle: () => void,
  ) {}

  /** Shows the figures at the cursor, or at the selected point if it is at none (-1). */
  read(hover: number): void {
    const { device, sum, state, set } = this.content;
    const point = hover >= 0 ? hover : Math.min(this.content.drawnPoint(state.now.point), device.points - 1);
    if (point < 0) return replace(this.readout, 'No memory was allocated.');
    const values = set.values(point);
    const seq = device.pointSeq[point] as number;
    const facts = [
      sum ? `event ${format.count(seq)} of all ranks` : `event ${format.count(seq)}`,
      positionText(device, point),
      `${format.duration(device.pointTime[point] as number)} after the first event`,
    ].filter(text => text !== '');
    const reserved = valueAt(device.reserved, seq);
    replace(
      this.readout,
      el('b', {}, format.size(device.total[point] as number)),
      ` allocated${reserved > 0 ? `, ${format.size(reserved)} reserved` : ''} \u00b7 ${facts.join(' \u00b7 ')}`,
      hover < 0 ? ' (selected)' : '',
    );
    replace(
      this.legend,
      set.series.map((series, i) => this.series(series, values[i] as number, point)).reverse(),
      this.line('reserved', 'reserved'),
      this.line('used', 'device used by the process'),
      this.line('capacity', 'capacity'),
    );
  }

  private series(series: { label: string; color: string }, bytes: number, point: number): HTMLElement {
    return el(
      'button',
      { type: 'button', class: bytes > 0 ? '' : 'zero', onclick: () => this.chooseSeries(series.label, point) },
      square(series.color),
      el('span', {}, series.label),
      el('b', {}, format.size(bytes)),
    );
  }

  /** Searches the live allocations for a series. Of the sum, shows those of a rank. */
  private chooseSeries(label: string, point: number): void {
    const { sum, state } = this.content;
    if (!sum) return state.set({ search: label });
    const rank = sum.devices[sum.series.findIndex(one => one.label === label)];
    if (rank) selectInSum(this.content, sum, point, rank);
  }

  private line(name: LineName, label: string): HTMLElement | null {
    if (!this.lines.exists(name)) return null;
    const pressed = this.lines.has(name);
    const toggle = () => {
      this.lines.toggle(name);
      this.onToggle();
    };
    return el(
      'button',
      {
        type: 'button',
        'aria-pressed': pressed ? 'true' : 'false',
        class: pressed ? '' : 'zero',
        onclick: toggle,
      },
      el('i', { class: `line ${name}` }),
      el('span', {}, label),
      name === 'capacity' ? el('b', {}, format.size(this.content.summary?.total_bytes as number)) : null,
    );
  }

  /** Says what is drawn, and how to get what the page lacks. */
  describe(isInGroup: boolean, isServed: boolean): void {
    const { device, sum } = this.content;
    const { rest, mismatches } = device.info;
    const { shortestPhase } = device.process;
    replace(
      this.note,
      device.window
        ? `Events ${rangeText(...device.window)}, loaded from the recording${rest ? '' : ', with all blocks'}. `
        : '',
      'Solid: at least this much was allocated throughout a column. ',
      'Paler: at most, divided as at that highest point. ',
      sum ? sumText(sum) : rest ? this.restText() : '',
      rest && !isInGroup ? moreText(isServed) : '',
      shortestPhase > 1 ? `Phases of fewer than ${format.count(shortestPhase)} events are not drawn. ` : '',
      mismatches > 0
        ? `At ${format.number(mismatches, 'event')}, the allocator's own total differs: the recording lacks frees. `
        : '',
    );
  }

  /** Which blocks are listed singly, and how the others are drawn. */
  private restText(): string {
    const { device } = this.content;
    const { blocks, rest } = device.info;
    const listed = device.window
      ? 'the largest of them'
      : 'all at the peak, at errors and at the end, and the largest others';
    return (
      `${format.number(blocks, 'block')} are listed singly: ${listed}. ` +
      `${format.number(rest?.blocks ?? 0, 'smaller or shorter-lived block')} ` +
      `(at most ${format.size(rest?.largest ?? 0)} each) are added up at ${format.count(device.points)} points: ` +
      'the highest, lowest and last event of each range of events. Totals are exact there. '
    );
  }
}

/** What the points of the sum over ranks are. */
function sumText(sum: RankTotals): string {
  const points = sum.info.rest
    ? `${format.count(sum.points)} of ${format.number(sum.info.events, 'allocation and free')}: ` +
      'the highest, lowest and last of each range'
    : 'each allocation and free of any of them';
  const devices = format.number(sum.devices.length, 'rank');
  return `The sum of ${devices} or devices at ${points}, in the order of the wall clock. `;
}

/** How to load all events of a part. */
function moreText(isServed: boolean): (string | Node)[] {
  if (isServed) return ['Zoom in to load all events and blocks of a part. '];
  const command = el('code', {}, 'memtrace open RUN --serve');
  return ['To load all events and blocks of a part, serve the page: ', command, '. '];
}
