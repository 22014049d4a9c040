/** An array that grows. */
export class Growing {
  private values = new Float64Array(1 << 12);
  length = 0;
  push(value: number): void {
    if (this.length === this.values.length) {
      const larger = new Float64Array(2 * this.length);
      larger.set(this.values);
      this.values = larger;
    }
    this.values[this.length++] = value;
  }
  get last(): number {
    return this.length === 0 ? 0 : (this.values[this.length - 1] as number);
  }
  at(index: number): number {
    return this.values[index] as number;
  }
  done(): Float64Array {
    return this.values.subarray(0, this.length);
  }
}
