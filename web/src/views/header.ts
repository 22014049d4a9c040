/** The line at the top of a page. */

import { el, replace } from '../dom';
import { toggleTheme } from '../theme';

/** The id of a part of the page, and its name. */
export type Part = readonly [id: string, name: string];

export function header(name: string, title: string, facts: string[]): HTMLElement {
  return el(
    'header',
    {},
    el('b', {}, name),
    title === '' ? null : el('code', { class: 'command', title }, title),
    facts.filter(text => text !== '').map(text => el('span', { class: 'tag', title: text }, text)),
    el('nav', { 'aria-label': 'Parts of the page' }),
    el(
      'button',
      {
        type: 'button',
        class: 'theme',
        'aria-label': 'Switch between light and dark',
        title: 'Light or dark',
        onclick: toggleTheme,
      },
      '\u25d0',
    ),
  );
}

/** Links to those of the parts that the page has. */
export function fillNav(head: HTMLElement, parts: readonly Part[]): void {
  const found = parts.filter(([id]) => document.getElementById(id));
  replace(
    head.querySelector('nav') as Element,
    found.map(([id, name]) => el('a', { href: `#${id}`, onclick: event => scrollInFrame(event, id) }, name)),
  );
}

/** In the frame of a notebook, the addresses of links begin with that of the notebook. So the page scrolls itself. */
function scrollInFrame(event: Event, id: string): void {
  if (location.protocol !== 'about:') return;
  event.preventDefault();
  document.getElementById(id)?.scrollIntoView({ behavior: 'smooth' });
}
