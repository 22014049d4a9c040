// The checker passes a sound snapshot and fails unsound ones.
// Needs python3, Chromium and a viewer (see README.md).
import assert from 'node:assert/strict';
import { execFileSync, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { after, test } from 'node:test';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const dir = mkdtempSync(join(tmpdir(), 'vizcheck-'));
after(() => rmSync(dir, { recursive: true }));

function check(sampleOptions, checkOptions = []) {
  const pickle = join(dir, 'sample.pickle');
  execFileSync('python3', [join(here, 'make_sample.py'), pickle, ...sampleOptions]);
  const run = spawnSync('node', [join(here, 'check.mjs'), pickle, '--out', dir, ...checkOptions], {
    encoding: 'utf8',
    maxBuffer: 64 << 20,
  });
  assert.notEqual(run.status, 2, run.stderr);
  return { status: run.status, ...JSON.parse(run.stdout) };
}
const messages = r => r.errors.map(e => e.message).join('\n');

test('a sound snapshot draws in every view, with stacks', () => {
  const r = check([], ['--require-frames']);
  assert.equal(r.status, 0, messages(r));
  const timeline = r.views.find(v => v.name === 'Active Memory Timeline');
  assert.ok(timeline.drawn > 150);
  assert.ok(timeline.coloured > 0.2);
  assert.match(timeline.stack, /train\.py:42:train_step/);
  assert.ok(r.views.length >= 4);
});

test('drag and drop, several GPUs, categories', () => {
  const r = check(['--devices', '2', '--categories'], ['--drop', '--device', 'all']);
  assert.equal(r.status, 0, messages(r));
  assert.deepEqual(r.devices, ['0', '1']);
  assert.ok(r.views.some(v => v.legend?.activations > 0));
});

test('a category that colours nothing is missed', () => {
  const r = check(['--categories'], ['--require-category', 'weights', '--require-category', 'gradients']);
  assert.equal(r.status, 1);
  assert.match(messages(r), /nothing is coloured as gradients/);
  assert.doesNotMatch(messages(r), /as weights/);
});

test('pickle protocol 5 is refused by the viewer', () => {
  const r = check(['--protocol', '5']);
  assert.equal(r.status, 1);
  assert.match(messages(r), /Unhandled version 5/);
});

test('a free that never completes breaks the state view', () => {
  const r = check(['--drop-action', 'free_completed']);
  assert.equal(r.status, 1);
  assert.match(messages(r), /free_requested/);
});
