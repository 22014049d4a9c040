// The parts of the page that compute: extremes, formats, the segments of the memory map.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { bundled } from './bundle.mjs';

const { Extremes } = await bundled('data/extremes.ts');
const format = await bundled('format.ts');
const { segmentsAt } = await bundled('data/segments.ts');
const { modulePattern } = await bundled('data/series.ts');

/** Numbers that look random and are the same in each run. */
function numbers(count, most, seed) {
  const found = [];
  for (let i = 0, x = seed; i < count; i++) {
    x = (x * 1103515245 + 12345) % 2147483648;
    found.push(Math.floor(x / 65536) % most);
  }
  return found;
}

test('extremes are those of a simple scan', () => {
  for (const length of [1, 15, 16, 17, 255, 256, 257, 5000]) {
    // Few distinct values: of equal ones, the first counts.
    const values = Float64Array.from(numbers(length, 7, length));
    const extremes = new Extremes(values);
    const bounds = numbers(400, length, 3);
    for (let i = 0; i + 1 < bounds.length; i += 2) {
      const [from, to] = [Math.min(bounds[i], bounds[i + 1]), Math.max(bounds[i], bounds[i + 1]) + 1];
      const part = [...values.subarray(from, to)];
      assert.equal(extremes.highest(from, to), from + part.indexOf(Math.max(...part)), `${from} to ${to} of ${length}`);
      assert.equal(extremes.lowest(from, to), from + part.indexOf(Math.min(...part)), `${from} to ${to} of ${length}`);
    }
  }
});

test('figures are formatted as in the terminal', () => {
  const sizes = [0, 512, 1023, 1024, 1536, 10 * 1024 ** 2, 999.6 * 1024 ** 2, 13.71 * 1024 ** 3];
  assert.deepEqual(sizes.map(format.size), [
    '0',
    '512 B',
    '1.00 KiB',
    '1.00 KiB',
    '1.50 KiB',
    '10.0 MiB',
    '0.98 GiB',
    '13.7 GiB',
  ]);
  assert.deepEqual(
    [format.signedSize(-2048), format.signedSize(2048), format.signedSize(0)],
    ['-2.00 KiB', '+2.00 KiB', '0'],
  );
  assert.deepEqual(
    [format.count(1234567), format.number(1, 'block'), format.share(1, 300), format.share(0, 3)],
    ['1,234,567', '1 block', '<1 %', '0 %'],
  );
  assert.deepEqual([format.labelStep(7.3, 6), format.labelStep(0.5, 6), format.labelStep(1100, 10)], [2, 0.1, 200]);
});

test('modules of one kind are one group', () => {
  const paths = ['blocks.3.attn.qkv', 'head', 'stages.0.blocks.7.norm', '/GPT', '/'];
  assert.deepEqual(paths.map(modulePattern), ['blocks.*', 'head', 'stages.*', 'GPT', 'the model itself']);
});

/** A device with these segment events (seq, kind, address, size) and blocks (address, size). */
function device(events, blocks) {
  const column = at => Float64Array.from(events.map(event => event[at]));
  return {
    segments: {
      seq: column(0),
      kind: Uint8Array.from(events.map(event => event[1])),
      address: column(2),
      size: column(3),
      pool: column(4),
      stream: column(4),
    },
    address: Float64Array.from(blocks.map(block => block[0])),
    size: Float64Array.from(blocks.map(block => block[1])),
  };
}

test('segments at a point in time', () => {
  const [alloc, free, map, unmap] = [0, 1, 2, 3];
  const events = [
    [1, alloc, 1000, 100, 0],
    [2, map, 5000, 40, 0],
    [3, map, 5040, 40, 0],
    [4, alloc, 2000, 50, 0],
    [5, free, 2000, 50, 0],
    [6, unmap, 5020, 30, 0],
  ];
  const blocks = [
    [1010, 20],
    [5060, 10],
    [1050, 30],
  ];
  const at = seq =>
    segmentsAt(device(events, blocks), seq, [0, 1, 2]).map(one => [one.address, one.size, one.used, one.blocks.length]);
  assert.deepEqual(at(0), []);
  assert.deepEqual(at(4), [
    [1000, 100, 50, 2],
    [2000, 50, 0, 0],
    [5000, 80, 10, 1],
  ]);
  assert.deepEqual(at(6), [
    [1000, 100, 50, 2],
    [5000, 20, 0, 0],
    [5050, 30, 10, 1],
  ]);
});
