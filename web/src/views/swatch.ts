import { el } from '../dom';

/** A square in a color of the style sheet. */
export function square(color: string): HTMLElement {
  const element = el('i', { class: 'swatch' });
  element.style.background = `var(--${color})`;
  return element;
}

/** A square before its label. */
export function swatch(color: string, label: Node | string): HTMLElement {
  return el('span', { class: 'labeled' }, square(color), label);
}
