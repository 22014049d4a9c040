/** What the reader has chosen, and the listeners that are called when it changes. */

import type { AxisKind } from './axis';
import type { Device } from './model';
import type { Division, Highlight } from './series';

export interface Choice {
  device: Device;
  /** The point whose live allocations are shown. */
  point: number;
  /** The point to compare with; -1 without one. */
  base: number;
  division: Division;
  axis: AxisKind;
  /** The blocks that the timeline colors instead of the division; `null` without any. */
  highlight: Highlight | null;
  /** What to search for in tables and pictures. */
  search: string;
}

export class State {
  private listeners: ((changed: Partial<Choice>) => void)[] = [];
  constructor(private choice: Choice) {}

  get now(): Readonly<Choice> {
    return this.choice;
  }

  set(changes: Partial<Choice>): void {
    // Points of one device mean nothing to another.
    const isOther = changes.device !== undefined && changes.device !== this.choice.device && changes.base === undefined;
    const changed = isOther ? { ...changes, base: -1 } : changes;
    this.choice = { ...this.choice, ...changed };
    for (const listener of this.listeners) listener(changed);
  }

  /** Calls `listener` after each change. */
  listen(listener: (changed: Partial<Choice>) => void): void {
    this.listeners.push(listener);
  }
}
