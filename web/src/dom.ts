/** Makes elements. Text of the recorded program becomes text nodes, never markup. */

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | ((event: never) => void)>;

/** An element with attributes (`onclick` and similar are listeners) and children. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: (Child | Child[])[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') element.addEventListener(name.slice(2), value as EventListener);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  append(element, children.flat());
  return element;
}

export function append(element: Element, children: Child[]): void {
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(typeof child === 'number' ? String(child) : child);
    }
  }
}

export function replace(element: Element, ...children: (Child | Child[])[]): void {
  element.replaceChildren();
  append(element, children.flat());
}

/** A text with code between backticks. */
export function codeParts(text: string): Child[] {
  return text.split('`').map((part, at) => (at % 2 === 1 ? el('code', {}, part) : part));
}

/**
 * A column's title, and its class: `n` for numbers, `wide` if narrow screens do not show it, `below` if they show it
 * below the other cells of its row.
 */
type Head = readonly [title: string, className?: string];

/** A table that scrolls sideways where it is wider than its place. */
export function scrollTable(columns: readonly Head[], rows: Child[], attributes: Attributes = {}): HTMLElement {
  const head = columns.map(([title, className]) => el('th', { class: className }, title));
  const table = el('table', attributes, el('thead', {}, el('tr', {}, head)), el('tbody', {}, rows));
  stackRows(
    table,
    columns.map(([, className]) => className ?? ''),
  );
  return el('div', { class: 'scroll' }, table);
}

/** Prepares a table whose columns have these classes for narrow screens. */
export function stackRows(table: HTMLElement, classes: string[]): void {
  const of = (name: string) => (one: string) => one.split(' ').includes(name);
  table.classList.toggle('stacked', classes.some(of('below')));
  const beside = classes.filter(one => !of('below')(one) && !of('wide')(one));
  table.style.setProperty('--tracks', beside.map(one => (of('n')(one) ? 'max-content' : 'auto')).join(' '));
}

/** A group of options of which one is chosen. */
export function choice(
  label: string,
  options: readonly (readonly [string, string])[],
  chosen: string,
  onchange: (value: string) => void,
): HTMLElement {
  const select = el('select', { 'aria-label': label, onchange: () => onchange(select.value) });
  for (const [value, text] of options) select.append(el('option', { value, selected: value === chosen }, text));
  return el('label', { class: 'choice' }, el('span', {}, label), select);
}

export function checkbox(label: string, checked: boolean, onchange: (checked: boolean) => void): HTMLElement {
  const input = el('input', { type: 'checkbox', checked, onchange: () => onchange(input.checked) });
  return el('label', { class: 'choice' }, input, el('span', {}, label));
}
