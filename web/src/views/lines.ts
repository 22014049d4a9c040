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
export function lineFigures(device: Device): Map<string, Map<number, Figures>> {
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
    if ((device.allocSeq[block] as number) <= peakSeq && peakSeq < (device.freeSeq[block] as number)) figures.peak += bytes;
  }
  return files;
}

export function linesView(device: Device, state: State): HTMLElement | null {
  const files = lineFigures(device);
  if (files.size === 0) return null;
  const sources = new Map(device.process.sources);
  const peakOf = (lines: Map<number, Figures>) => [...lines.values()].reduce((sum, one) => sum + one.peak, 0);
  const sorted = [...files].sort((a, b) => peakOf(b[1]) - peakOf(a[1]) || (a[0] < b[0] ? -1 : 1));
  const most = Math.max(1, ...sorted.flatMap(([, lines]) => [...lines.values()].map(one => one.peak)));
  const row = (file: string, line: number, text: string | null, figures: Figures | undefined) => {
    const peak = el('td', { class: 'n share' }, figures ? format.size(figures.peak) : '');
    if (figures) peak.style.backgroundSize = `${(100 * figures.peak) / most}% 100%`;
    const name = file.split('/').at(-1) ?? file;
    return el(
      'tr',
      { class: figures ? 'has' : '' },
      peak,
      el('td', { class: 'n wide' }, figures ? format.size(figures.allocated) : ''),
      el('td', { class: 'n wide' }, figures ? format.count(figures.blocks) : ''),
      el(
        'td',
        { class: 'n' },
        figures
          ? el(
              'button',
              {
                type: 'button',
                class: 'link',
                'aria-label': `Live allocations of line ${line}`,
                onclick: () => {
                  state.set({ point: device.peak, search: `${name}:${line} ` });
                  document.getElementById('allocations')?.scrollIntoView({ behavior: 'smooth' });
                },
              },
              String(line),
            )
          : String(line),
      ),
      el('td', { class: 'source' }, el('pre', {}, text ?? '')),
    );
  };
  return el(
    'section',
    { class: 'card w12', id: 'lines' },
    el('h2', {}, 'Lines'),
    el(
      'p',
      { class: 'note' },
      'Each block counts at the innermost line of the program\u2019s own code in its stack. Blocks of the backward pass count at the forward line.',
      device.info.rest ? ' Only blocks that are listed singly count.' : '',
    ),
    sorted.slice(0, 20).map(([file, lines], at) => {
      const ranges = sources.get(file);
      const rows: HTMLElement[] = [];
      if (ranges) {
        ranges.forEach(([from, texts], i) => {
          if (i > 0) rows.push(el('tr', { class: 'gap' }, el('td', { colspan: 5 }, '\u22ef')));
          texts.forEach((text, n) => rows.push(row(file, from + n, text, lines.get(from + n))));
        });
      } else {
        [...lines].sort((a, b) => a[0] - b[0]).forEach(([line, figures]) => rows.push(row(file, line, null, figures)));
      }
      return el(
        'details',
        { open: at === 0, class: 'file' },
        el('summary', {}, el('code', {}, file), ` ${format.size(peakOf(lines))} at the peak`, ranges ? '' : ' (the source is not in the page)'),
        scrollTable(
          [['At the peak', 'n'], ['Allocated in all', 'n wide'], ['Blocks', 'n wide'], ['Line', 'n'], ['Source']],
          rows,
          { class: 'code-table' },
        ),
      );
    }),
  );
}
