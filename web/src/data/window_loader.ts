/** Loads the events and blocks of a window from the server of the page (`memtrace open --serve`). */

import { inflated } from './decode';
import { type Device, Process } from './model';

export class WindowLoader {
  constructor(
    /** A window of at most so many events has every block. */
    readonly completeEvents: number,
    /** The number of a process on the page. */
    private numberOf: (process: Process) => number,
  ) {}

  /** The device from one event to another. The error is a sentence. */
  async load(whole: Device, first: number, last: number): Promise<Device> {
    const { device: ordinal } = whole.info;
    const query = new URLSearchParams({
      process: `${this.numberOf(whole.process)}`,
      device: `${ordinal}`,
      from: `${first}`,
      to: `${last}`,
    });
    const answer = await fetch(`window?${query}`).catch(() => {
      throw new Error('The server does not answer. Is memtrace open --serve still running?');
    });
    if (!answer.ok) throw new Error(`The server cannot read these events: ${(await answer.text()).trim()}.`);
    const process = new Process(await inflated(await answer.arrayBuffer()));
    const device = process.devices.find(one => one.info.device === ordinal);
    if (!device || device.points === 0) throw new Error('The server has no events here.');
    device.whole = whole;
    device.window = [first, last];
    return device;
  }
}
