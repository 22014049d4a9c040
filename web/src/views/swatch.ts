import { el } from '../dom';

/** A square in a color of the style sheet, before its label. */
export function swatch(color: string, label: string): HTMLElement {
  const square = el('i', { class: 'swatch' });
  square.style.background = `var(--${color})`;
  return el('span', { class: 'labeled' }, square, label);
}
