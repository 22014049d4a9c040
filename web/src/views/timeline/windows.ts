/** Loads all events and blocks of the visible part, where the page has only the largest ones. */

import type { Device } from '../../data/model';
import type { WindowLoader } from '../../data/window_loader';
import { el, replace } from '../../dom';
import * as format from '../../format';
import type { Content } from './content';
import type { Viewport } from './viewport';

/** The number of windows that are kept. */
const MOST_WINDOWS = 4;
/** How long the visible part must stay as it is before its events are loaded, in milliseconds. */
const DELAY = 250;
/** At least so many events are loaded before and after the visible ones. */
const MARGIN = 100_000;

/** What the timeline does with windows. */
interface WindowsHost {
  /** Draws this device instead. */
  use(device: Device): void;
  draw(): void;
}

export class Windows {
  /** What is loaded now, or why it cannot be. */
  readonly element = el('p', { class: 'note', role: 'status' });
  private loaded: Device[] = [];
  private timer = 0;
  private isLoading = false;
  private failed = false;

  constructor(
    /** Where to get what the page lacks; `null` if it came from a file. */
    readonly loader: WindowLoader | null,
    private content: Content,
    private viewport: Viewport,
    private host: WindowsHost,
  ) {}

  /** Drops all windows, since another device is drawn. */
  clear(): void {
    this.loaded = [];
    if (this.failed) replace(this.element);
    this.failed = false;
  }

  /** The window that has an event with all blocks. */
  complete(seq: number): Device | undefined {
    return this.loaded.find(one => one.covers(seq) && !one.info.rest);
  }

  /** Draws the loaded window that has the visible part, if there is one, and plans to load it if there is none. */
  choose(): void {
    const { loader, content } = this;
    if (!loader || content.sum || !content.whole.info.rest) return;
    const [first, last] = this.viewport.visibleEvents;
    const length = ({ window }: Device) => (window ? window[1] - window[0] : Infinity);
    const found = this.loaded.filter(one => one.covers(first) && one.covers(last));
    found.sort((a, b) => Number(a.info.rest !== null) - Number(b.info.rest !== null) || length(a) - length(b));
    const device = found[0] ?? content.whole;
    if (device !== content.device) this.host.use(device);
    clearTimeout(this.timer);
    if (this.lacksEvents(first, last) && !this.failed) {
      this.timer = window.setTimeout(() => void this.load(loader), DELAY);
    }
  }

  /** Whether the recording has events in the visible part that are not drawn, and too few points to fill it. */
  private lacksEvents(first: number, last: number): boolean {
    const { info, window } = this.content.device;
    const { visiblePoints, width } = this.viewport;
    // The points of a window do not come closer by loading nearly the same window again.
    if (info.rest === null || (window && 2 * (last - first) > window[1] - window[0])) return false;
    return visiblePoints < width && last - first >= visiblePoints;
  }

  /** Loads the visible events and some around them. One request at a time. */
  private async load(loader: WindowLoader): Promise<void> {
    const { whole } = this.content;
    const [first, last] = this.viewport.visibleEvents;
    if (this.isLoading || !this.lacksEvents(first, last)) return;
    // As much around them as comes with all blocks.
    const most = Math.max(0, Math.floor((loader.completeEvents - 1 - (last - first)) / 2));
    const margin = Math.min(Math.max(MARGIN, Math.ceil((last - first) / 2)), most);
    this.isLoading = true;
    replace(this.element, `Loading events ${rangeText(first, last)}`);
    try {
      const device = await loader.load(whole, Math.max(0, first - margin), last + margin);
      replace(this.element);
      if (whole === this.content.whole) this.add(device);
    } catch (error) {
      this.fail(error);
    } finally {
      this.isLoading = false;
    }
    // The reader can have moved on meanwhile.
    this.choose();
    this.host.draw();
  }

  /** Shows an error once, until the reader tries again. */
  private fail(error: unknown): void {
    this.failed = true;
    const again = () => {
      this.failed = false;
      replace(this.element);
      this.choose();
    };
    replace(
      this.element,
      el('span', { class: 'bad' }, error instanceof Error ? error.message : String(error)),
      ' ',
      el('button', { type: 'button', onclick: again }, 'Try again'),
    );
  }

  private add(device: Device): void {
    this.loaded.push(device);
    if (this.loaded.length > MOST_WINDOWS) this.content.forget(this.loaded.shift() as Device);
    // The selected state is shown with all of its blocks.
    const { state } = this.content;
    const { now } = state;
    const [point, base] = [now.point, now.base].map(at => now.device.pointSeq[at] ?? -1) as [number, number];
    const isBetter = now.device.whole === device.whole && now.device.info.rest !== null && device.covers(point);
    if (isBetter && (now.base < 0 || device.covers(base))) {
      state.set({ device, point: device.pointOf(point), base: now.base < 0 ? -1 : device.pointOf(base) });
    }
  }
}

/** `1,200,000 to 1,400,000`. */
export function rangeText(first: number, last: number): string {
  return `${format.count(first)} to ${format.count(last)}`;
}
