// The data of the page, decoded, and its numbers as texts.

const SIZES = [
  ["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024],
];
const TIMES = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]];

function scaled(value, units, last, decimals) {
  const [unit, one] = units.find(([, one]) => Math.abs(value) >= one) || [last, 1];
  return `${one === 1 ? Math.round(value) : (value / one).toFixed(decimals)} ${unit}`;
}

/** Bytes, such as `1.9 GiB`. */
const bytes = (value) => scaled(value, SIZES, "B", 1);
/** Nanoseconds, such as `1.25 ms`. */
const nanos = (value) => scaled(value, TIMES, "ns", 2);
/** A whole number with its thousands apart. */
const count = (value) => value.toLocaleString("en-US");
/** A number by the unit in which a key of `--json` ends; null where the key names none. */
function byKey(key, value) {
  if (typeof value !== "number") return null;
  if (key.endsWith("_bytes")) return bytes(value);
  if (key.endsWith("_ns")) return nanos(value);
  if (key.endsWith("_s")) return nanos(value * 1e9);
  return null;
}

function summed(differences) {
  const all = new Float64Array(differences.length);
  let value = 0;
  for (let i = 0; i < all.length; i++) all[i] = value += differences[i];
  return all;
}

/** The number of leading items of sorted `all` that are at most `value`. */
function upTo(all, value) {
  let low = 0, high = all.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Blocks of memory as columns. */
class Blocks {
  constructor(form) {
    this.from = summed(form.from);
    const end = (life, i) => life ? this.from[i] + life - 1 : Infinity;
    this.until = Float64Array.from(form.life, end);
    Object.assign(this, {
      bytes: form.bytes, layer: form.layer, label: form.label, labels: form.labels,
      leftOut: form.left_out, count: form.from.length,
    });
  }

  /** What is known of a block, in words. */
  text(block) {
    const { name, module, line } = this.labels[this.label[block]];
    return { name: name || "", module: module || "", line: line || "" };
  }

  /** The blocks that live at a position. */
  at(position) {
    const found = [];
    const begun = upTo(this.from, position);
    for (let i = 0; i < begun; i++) if (this.until[i] > position) found.push(i);
    return found;
  }

  /** The blocks whose name, module or line has these words. */
  search(words) {
    const parts = words.toLowerCase().split(/\s+/).filter((part) => part);
    const hit = this.labels.map((label) => {
      const text = `${label.name || ""} ${label.module || ""} ${label.line || ""}`.toLowerCase();
      return parts.length > 0 && parts.every((part) => text.includes(part));
    });
    const found = [];
    for (let i = 0; i < this.count; i++) if (hit[this.label[i]]) found.push(i);
    return found;
  }

  /** A function that gives the bytes of some blocks, in their order, that live at a position. */
  total(some) {
    const ends = Array.from(some).sort((a, b) => this.until[a] - this.until[b]);
    const column = (order, at) => {
      const sums = new Float64Array(order.length + 1);
      order.forEach((block, i) => { sums[i + 1] = sums[i] + this.bytes[block]; });
      return [Float64Array.from(order, (block) => at[block]), sums];
    };
    const [from, begun] = column(some, this.from), [until, ended] = column(ends, this.until);
    return (position) => begun[upTo(from, position)] - ended[upTo(until, position)];
  }

  /** Every beginning (+block + 1) and end (-block - 1) in order, with their positions. */
  get changes() {
    if (!this.order) {
      const ends = [];
      for (let i = 0; i < this.count; i++) if (this.until[i] < Infinity) ends.push(i);
      ends.sort((a, b) => this.until[a] - this.until[b]);
      this.order = new Int32Array(this.count + ends.length);
      this.places = new Float64Array(this.order.length);
      for (let b = 0, e = 0, k = 0; k < this.order.length; k++) {
        const end = e < ends.length && (b >= this.count || this.until[ends[e]] <= this.from[b]);
        this.places[k] = end ? this.until[ends[e]] : this.from[b];
        this.order[k] = end ? -(ends[e++] + 1) : b++ + 1;
      }
    }
    return this;
  }
}

/** Values in levels of detail: of each layer, and after them of each line. */
class Course {
  constructor(form, blocks) {
    Object.assign(this, { layers: form.layers, lines: form.lines, end: form.end, blocks });
    this.levels = form.levels.map((level) => ({
      at: summed(level.at), values: level.values.map(summed),
    }));
    // Requests have one change each, so that the blocks say what no level does.
    this.exact = !form.whole && form.across === "requests" && blocks && blocks.leftOut === 0;
  }

  /** The values between two positions and beside them, in the detail that a screen can show. */
  within(from, until) {
    const cut = (level) => [Math.max(0, upTo(level.at, from) - 1), upTo(level.at, until)];
    const size = (level) => { const [a, b] = cut(level); return b - a; };
    let fine = this.levels.length - 1;
    while (fine > 0 && size(this.levels[fine]) > 6000) fine--;
    const level = this.levels[fine];
    const [first, after] = cut(level);
    if (this.exact && fine === this.levels.length - 1 && until - from < 6000) {
      return this.everyChange(level, first, until);
    }
    const part = (column) => Array.from(column.subarray(first, after));
    return this.closed(part(level.at), level.values.map(part), until);
  }

  /** As the blocks say, from row `first` of a level on. */
  everyChange(level, first, until) {
    const { order, places } = this.blocks.changes;
    const now = level.values.map((column) => column[first]);
    const at = [level.at[first]], values = now.map((value) => [value]);
    let row = first + 1;
    for (let k = upTo(places, at[0]); k < order.length && places[k] <= until; k++) {
      const block = Math.abs(order[k]) - 1;
      now[this.blocks.layer[block]] += Math.sign(order[k]) * this.blocks.bytes[block];
      while (row < level.at.length && level.at[row] <= places[k]) row++;
      for (let c = this.layers.length; c < now.length; c++) now[c] = level.values[c][row - 1];
      at.push(places[k]);
      now.forEach((value, c) => values[c].push(value));
    }
    return this.closed(at, values, until);
  }

  /** Draws the last values on, to where they end. */
  closed(at, values, until) {
    const end = Math.min(until, this.end);
    if (at.length && at[at.length - 1] < end) {
      at.push(end);
      values.forEach((column) => column.push(column[column.length - 1]));
    }
    return { at, values };
  }
}
