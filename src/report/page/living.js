
// What lives at an instant of a chart that knows its blocks, in words.

/** The blocks that are listed at most. */
const LISTED = 20;

class Living {
  constructor(chart, blocks) {
    this.chart = chart;
    this.blocks = blocks;
    const known = (key) => blocks.labels.some((label) => label[key]);
    this.texts = ["name", "module", "line"].filter(known);
    this.bySize = (a, b) => blocks.bytes[b] - blocks.bytes[a];
  }

  layer(block) { return this.chart.form.layers[this.blocks.layer[block]]; }

  /** The blocks at an instant; first the chosen one, where there is one. */
  at(instant, chosen) {
    const living = this.blocks.at(instant).sort(this.bySize);
    const { leftOut } = this.blocks;
    const small = leftOut ? ` (${count(leftOut)} small blocks are in the curve and not listed)` : "";
    const rest = living.length > LISTED ? `, the largest ${LISTED}:` : ":";
    return [
      chosen === null ? null : this.life(chosen),
      make("p", { className: "faint" }, `${count(living.length)} blocks live here${rest}${small}`),
      this.list(living, chosen),
    ].filter((element) => element);
  }

  /** A block's whole life. */
  life(block) {
    const { bytes: size, from, until } = this.blocks;
    const { name, module, line } = this.blocks.text(block);
    const { chart } = this;
    const ends = until[block] < Infinity ? `until ${chart.place(until[block])}` : "to the end";
    const words = [name, module && `in ${module}`, line && `at ${line}`].filter((word) => word);
    return make("p", { className: "block" }, make("b", {}, words.join(", ") || "a block"),
      ` — ${bytes(size[block])} (${count(size[block])} bytes), ` +
      `${this.layer(block)}, from ${chart.place(from[block])} ${ends}`);
  }

  /** Some blocks as a table; pressing a row's button shows the block's life. */
  list(some, chosen) {
    const { bytes: size, from } = this.blocks;
    const row = (block) => {
      const text = this.blocks.text(block);
      const button = make("button", { type: "button", title: "Show its whole life" }, "life");
      button.addEventListener("click", () => this.choose(block));
      return make("tr", { className: block === chosen ? "chosen" : "" },
        make("td", { className: "number" }, bytes(size[block])),
        ...this.texts.map((key) => make("td", {}, text[key])),
        make("td", {}, this.layer(block)),
        make("td", {}, this.chart.place(from[block])), make("td", {}, button));
    };
    const head = ["bytes", ...this.texts, "layer", "since", ""];
    return make("div", { className: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))),
      make("tbody", {}, ...some.slice(0, LISTED).map(row))));
  }

  /** Zooms to a block's life and marks it. */
  choose(block) {
    const { view } = this.chart;
    const from = this.blocks.from[block], end = Math.min(this.blocks.until[block], view.end);
    const room = Math.max((end - from) / 10, 2);
    view.show(from - room, end + room);
    view.pinned = true;
    this.chart.look(from, block);
  }

  /** Lists the blocks that have some words, and has their sum drawn. */
  search(words) {
    const { chart } = this;
    const found = this.blocks.search(words);
    chart.chosen = null;
    chart.matching = found.length ? this.blocks.total(found) : null;
    chart.show();
    chart.view.pinned = words.trim() !== "";
    if (!chart.view.pinned) return chart.view.say([]);
    const rest = found.length > LISTED ? `; the largest ${LISTED}:` : ":";
    const head = `${count(found.length)} blocks match, the thick line is their sum${rest}`;
    const largest = Array.from(found).sort(this.bySize);
    chart.view.say([make("p", {}, head), this.list(largest, null)]);
  }
}
