/** What the reader can choose for timelines: the division of the areas, and the axis. */

import type { AxisKind } from '../../data/axis';
import type { Division } from '../../data/series';
import { choice } from '../../dom';

/** The ways to divide the areas of any run. */
export const DIVISIONS: readonly (readonly [Division, string])[] = [
  ['category', 'category'],
  ['phase', 'phase'],
  ['module', 'module'],
  ['line', 'line of the program'],
];

/** By what the areas are divided. */
export function divisionChoice(
  chosen: Division,
  onchange: (division: Division) => void,
  divisions = DIVISIONS,
): HTMLElement {
  return choice('Stacked by', divisions, chosen, value => onchange(value as Division));
}

/** The horizontal axis. */
export function axisChoice(chosen: AxisKind, onchange: (axis: AxisKind) => void): HTMLElement {
  return choice(
    'over',
    [
      ['order', 'allocation order'],
      ['steps', 'steps'],
      ['time', 'time'],
    ],
    chosen,
    value => onchange(value as AxisKind),
  );
}
