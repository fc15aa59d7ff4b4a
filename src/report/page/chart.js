// One chart: layers on top of each other and lines, with what lives at an instant.

// Okabe and Ito's colours, which the colour-blind can tell apart, and grey.
const LAYERS = [
  "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#f0e442", "#cc79a7", "#969696",
];
const LINES = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const HEIGHT = 380;
/** Distances between ticks of an axis of bytes: powers of two. */
const TICKS = Array.from({ length: 52 }, (_, power) => 2 ** power);
/** Distances between ticks of an axis of requests. */
const COUNTS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((one) => [one, 2 * one, 5 * one]);

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element with properties and children, which are elements or texts. */
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

class Chart {
  /** `view` has the shared range and is asked to change it. */
  constructor(form, view, root) {
    this.form = form;
    this.view = view;
    this.blocks = form.blocks && new Blocks(form.blocks);
    this.living = this.blocks && new Living(this, this.blocks);
    this.course = new Course(form, this.blocks);
    this.value = form.unit === "bytes" ? bytes : count;
    this.stepped = form.layers.length > 0;
    this.swatches = [];
    this.legend = make("div", { className: "legend" });
    this.frame = make("div", { className: "chart", tabIndex: 0 });
    this.frame.setAttribute("role", "img");
    this.frame.setAttribute("aria-label", `${form.name}: ${this.spoken()}`);
    root.append(make("h2", {}, form.name), this.legend, this.frame);
    this.fillLegend();
    const nothing = [[0], ...this.columns(() => [0])];
    this.plot = new uPlot(this.options(root.clientWidth), nothing, this.frame);
    this.frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.frame.addEventListener("keydown", (event) => view.key(event));
    this.plot.over.addEventListener("dblclick", () => view.show(0, view.end));
    this.plot.over.addEventListener("click", () => this.clicked());
    if (form.lanes.length) this.lanes = new Lanes(form.lanes, this, root);
  }

  /** The chart in a sentence, for those who do not see it. */
  spoken() {
    return this.form.peaks.map((peak) => `peak of ${peak.name} ${this.value(peak.value)} ` +
      `at ${this.position(peak.at)}`).join("; ");
  }

  position(at) {
    return this.form.across === "time" ? nanos(at) : `request ${count(Math.floor(at))}`;
  }

  colour(layer) { return LAYERS[layer % LAYERS.length]; }

  lineColour(line) {
    return this.stepped ? (line ? LINES[(line - 1) % LINES.length] : style("--ink"))
      : LINES[line % LINES.length];
  }

  fillLegend() {
    const entry = (name, colour, kind, hidden) => {
      const value = make("b", {});
      const swatch = make("i", { className: kind });
      swatch.style.background = colour;
      this.legend.append(make("span", { hidden }, swatch, `${name} `, value));
      this.swatches.push([swatch, value]);
    };
    // A layer in which there never is anything has no name to be looked for.
    const empty = (layer) => this.course.levels[0].values[layer].every((value) => value === 0);
    this.form.layers.forEach((name, i) => entry(name, this.colour(i), "", empty(i)));
    this.form.lines.forEach((name, i) => entry(name, this.lineColour(i), "line", false));
    for (const limit of this.form.limits) {
      this.legend.append(make("span", { className: "faint" },
        `${limit.name}: ${this.value(limit.value)}`));
    }
  }

  /** The series of uPlot, made by `layer` and `line`: the highest sum of layers comes first, and
      each smaller one covers it from below, so that the visible part is the layer. */
  columns(layer, line = layer) {
    const layers = this.form.layers.map((_, i) => layer(i)).reverse();
    return [...layers, ...this.form.lines.map((_, i) => line(i)), line(-1)];
  }

  options(width) {
    const paths = uPlot.paths.stepped({ align: 1 });
    const points = { show: false };
    const ruled = { stroke: () => style("--grid"), width: 1 };
    const axis = { stroke: () => style("--faint"), grid: ruled, ticks: ruled };
    const layer = (i) => ({ paths, points, fill: this.colour(i), width: 0 });
    const line = (i) => i < 0 ? { paths, points, stroke: () => style("--ink"), width: 3 } : {
      paths, points, stroke: () => this.lineColour(i), width: 2,
      fill: this.stepped ? null : this.lineColour(i) + "24",
    };
    const labels = (plot, splits) => {
      const span = Math.max(...splits.map(Math.abs), 1);
      const [unit, one] = SIZES.find(([, one]) => span >= 2 * one) || ["B", 1];
      return splits.map((value) => this.form.unit === "bytes"
        ? `${+(value / one).toFixed(2)} ${unit}` : count(value));
    };
    const across = (plot, splits) => {
      const span = Math.max(...splits.map(Math.abs), 1);
      const [unit, one] = TIMES.find(([, one]) => span >= 2 * one) || ["ns", 1];
      return splits.map((value) => this.form.across === "time"
        ? `${+(value / one).toPrecision(6)} ${unit}` : count(value));
    };
    const inBytes = this.form.unit === "bytes", inRequests = this.form.across === "requests";
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [14, 30, 0, 0],
      scales: {
        x: { time: false }, y: { range: () => [0, this.top || 1] },
      },
      axes: [{ ...axis, values: across, space: 90, ...(inRequests && { incrs: COUNTS }) },
        { ...axis, values: labels, size: 80, space: 44, ...(inBytes && { incrs: TICKS }) }],
      series: [{}, ...this.columns(layer, line)],
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false } },
      hooks: {
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [() => this.view.later(() => this.pointed())],
        draw: [(plot) => this.overlay(plot)],
      },
    };
  }

  /** Shows what the view's range has. */
  show() {
    const { from, until } = this.view;
    const { at, values } = this.course.within(from, until);
    this.shown = { at, values };
    const layers = this.form.layers.length;
    const sums = [];
    for (let i = 0; i < layers; i++) {
      sums.push(i ? values[i].map((value, k) => value + sums[i - 1][k]) : values[i]);
    }
    this.sums = sums;
    const matching = this.matching || (() => null);
    const matches = at.map((position) => matching(position));
    const data = this.columns((i) => sums[i], (i) => i < 0 ? matches : values[layers + i]);
    let most = 1;
    for (const column of data) for (const value of column) if (value > most) most = value;
    // A line far above the curves would flatten them.
    const near = this.form.limits.map((limit) => limit.value).filter((value) => value / 2 <= most);
    this.top = Math.max(most, ...near) * 1.06;
    this.plot.batch(() => {
      this.plot.setData([at, ...data], false);
      this.plot.setScale("x", { min: from, max: until });
    });
    if (this.lanes) this.lanes.draw();
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.dragged = true;
    this.view.show(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  wheel(event) {
    event.preventDefault();
    const { from, until } = this.view;
    const box = this.plot.over.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const moved = event.deltaY || event.deltaX;
    if (sideways) return this.view.move(Math.sign(event.deltaX || event.deltaY) / 10);
    this.view.zoom(moved > 0 ? 1.3 : 1 / 1.3, from + share * (until - from));
  }

  /** Lists what is under the pointer. */
  pointed() {
    const { left, top } = this.plot.cursor;
    if (this.view.pinned || left === undefined || left < 0) return;
    const at = this.plot.posToVal(left, "x");
    this.look(at, this.blocks ? this.hit(at, this.plot.posToVal(top, "y")) : null);
  }

  clicked() {
    // The end of a drag is no click.
    if (this.dragged) { this.dragged = false; return; }
    this.view.pinned = false;
    this.pointed();
    this.view.pinned = true;
  }

  /** The row of what is shown that holds at a position. */
  row(at) { return Math.max(0, upTo(this.shown.at, at) - 1); }

  /** The block at a position and a height. */
  hit(at, height) {
    const row = this.row(at);
    const layer = this.sums.findIndex((sum) => sum[row] > height);
    if (layer < 0 || height < 0) return null;
    let rest = height - (layer ? this.sums[layer - 1][row] : 0);
    for (const block of this.blocks.at(at)) {
      if (this.blocks.layer[block] !== layer) continue;
      rest -= this.blocks.bytes[block];
      if (rest < 0) return block;
    }
    return null;
  }

  /** Shows an instant, and a block of it where there is one. */
  look(at, block) {
    if (!this.shown.at.length) return;
    const row = this.row(at);
    const last = this.form.layers.length + this.form.lines.length;
    for (let i = 0; i < last; i++) {
      this.swatches[i][1].textContent = this.value(this.shown.values[i][row]);
    }
    this.chosen = block;
    this.instant = at;
    const sum = this.sums.length ? this.sums[this.sums.length - 1][row] : null;
    const together = sum === null ? "" : `, together ${this.value(sum)}`;
    const head = make("p", {}, make("b", {}, this.place(at)), together);
    this.view.say([head, ...(this.living ? this.living.at(at, block) : [])]);
    this.plot.redraw(false);
  }

  /** Where in the steps and phases a position is. */
  phase(at) {
    const begun = this.form.marks.filter((mark) => mark.at <= at);
    const step = begun.findLast((mark) => mark.step);
    const phase = begun.findLast((mark) => !mark.step);
    const names = [step, phase && (!step || phase.at >= step.at) ? phase : null];
    return names.filter((mark) => mark).map((mark) => mark.name).join(", ");
  }

  /** A position with its phase. */
  place(at) {
    const phase = this.phase(at);
    return this.position(at) + (phase ? ` (${phase})` : "");
  }

  /** What uPlot does not draw: limits, marks, the chosen block. */
  overlay(plot) {
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio || 1;
    const x = (value) => plot.valToPos(value, "x", true);
    const y = (value) => plot.valToPos(value, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillStyle = ctx.strokeStyle = style("--faint");
    ctx.lineWidth = ratio;
    this.drawMarks(ctx, bbox, x, ratio);
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.fillStyle = ctx.strokeStyle = style("--ink");
    for (const limit of this.form.limits.filter((limit) => limit.value <= this.top)) {
      ctx.beginPath();
      ctx.moveTo(bbox.left, y(limit.value));
      ctx.lineTo(bbox.left + bbox.width, y(limit.value));
      ctx.stroke();
      ctx.fillText(limit.name, bbox.left + 6 * ratio, y(limit.value) - 4 * ratio);
    }
    ctx.setLineDash([]);
    if (this.view.pinned && this.instant !== undefined) {
      ctx.fillRect(x(this.instant), bbox.top, ratio, bbox.height);
    }
    if (this.chosen !== null && this.chosen !== undefined) this.outline(ctx, x, y, ratio);
    ctx.restore();
  }

  /** Draws where steps and phases begin. Names of steps come first where there is no room. */
  drawMarks(ctx, bbox, x, ratio) {
    const places = this.form.marks.map((mark) => [x(mark.at), mark]);
    const inside = places.filter(([at]) => at >= bbox.left - 1 && at <= bbox.left + bbox.width);
    const taken = [];
    const steps = inside.filter(([, mark]) => mark.step);
    for (const [at, { name, step }] of steps.concat(inside.filter(([, mark]) => !mark.step))) {
      const right = at + ctx.measureText(name).width + 12 * ratio;
      const free = taken.every(([from, until]) => right <= from || at >= until);
      // Of phases that are too near to be named not even the line helps.
      if (!step && !free) continue;
      ctx.setLineDash(step ? [] : [2 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      if (!free) continue;
      ctx.fillText(name, at + 3 * ratio, bbox.top - 3 * ratio);
      taken.push([at, right]);
    }
  }

  /** Draws the shape of the chosen block over its life: on the layers below, and on the blocks of
      its own layer that are older. */
  outline(ctx, x, y, ratio) {
    const { blocks, chosen, sums } = this;
    const { from, until, layer, bytes: size } = blocks;
    const older = blocks.at(from[chosen]).filter((b) => b < chosen && layer[b] === layer[chosen]);
    const below = blocks.total(older);
    const start = Math.max(from[chosen], this.view.from);
    const end = Math.min(until[chosen], this.view.until);
    if (start >= end) return;
    const base = (at) => (layer[chosen] ? sums[layer[chosen] - 1][this.row(at)] : 0) + below(at);
    const inside = this.shown.at.filter((at) => at > start && at < end);
    const edge = [];
    let before = base(start);
    edge.push([start, before]);
    for (const at of inside) {
      edge.push([at, before]);
      edge.push([at, before = base(at)]);
    }
    edge.push([end, before]);
    ctx.beginPath();
    edge.forEach(([at, height]) => ctx.lineTo(x(at), y(height)));
    edge.reverse().forEach(([at, height]) => ctx.lineTo(x(at), y(height + size[chosen])));
    ctx.closePath();
    ctx.globalAlpha = 0.35;
    ctx.fillStyle = style("--paper");
    ctx.fill();
    ctx.globalAlpha = 1;
    ctx.lineWidth = 2 * ratio;
    ctx.strokeStyle = style("--ink");
    ctx.stroke();
  }

  redraw() {
    this.swatches.slice(this.form.layers.length).forEach(([swatch], i) => {
      swatch.style.background = this.lineColour(i);
    });
    this.plot.redraw();
    if (this.lanes) this.lanes.draw();
  }

  resize(width) {
    this.plot.setSize({ width, height: HEIGHT });
    if (this.lanes) this.lanes.draw();
  }
}
