/** Reads the binary data of the page: `analysis/output/src/page_data/encode.rs` describes the format. */

/** The decompressed content of a data element of the page. */
export async function dataOf(id: string): Promise<Uint8Array | null> {
  const element = document.getElementById(id);
  if (!element) return null;
  const text = atob(element.textContent ?? '');
  // The text of a large page takes as much memory as the data.
  element.remove();
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return inflated(bytes);
}

/** Decompressed data. */
export async function inflated(bytes: BlobPart): Promise<Uint8Array> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Reads LEB128 numbers. Numbers are exact up to 2^53. */
export class Reader {
  at: number;
  constructor(
    readonly bytes: Uint8Array,
    from: number,
    readonly end: number,
  ) {
    this.at = from;
  }

  next(): number {
    const { bytes } = this;
    let byte = bytes[this.at++] as number;
    if (byte < 0x80) return byte;
    let value = byte & 0x7f;
    let scale = 0x80;
    do {
      byte = bytes[this.at++] as number;
      value += (byte & 0x7f) * scale;
      scale *= 0x80;
    } while (byte >= 0x80);
    return value;
  }

  /** A zigzag-encoded number. */
  signed(): number {
    const value = this.next();
    return value % 2 === 0 ? value / 2 : -(value + 1) / 2;
  }
}

/** The records of decompressed data: tag and content. */
export function* records(bytes: Uint8Array): Generator<[string, Reader]> {
  let at = 0;
  while (at < bytes.length) {
    const tag = String.fromCharCode(bytes[at] as number);
    const head = new Reader(bytes, at + 1, bytes.length);
    const length = head.next();
    yield [tag, new Reader(bytes, head.at, head.at + length)];
    at = head.at + length;
  }
}
