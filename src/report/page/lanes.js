
// Rows of spans below a chart, over the same horizontal axis.

/** Colour and words for each kind of span. */
const KINDS = {
  operator: ["#969696", "operator"], recompute: ["#e69f00", "computed again"],
  out: ["#0072b2", "copy to the host"], in: ["#009e73", "copy from the host"],
  lost: ["#d55e00", "waiting for a copy"], waiting: ["#cc79a7", "waiting"],
  running: ["#0072b2", "on the device"],
};

/** The beginning of a text that is no wider than `room`. */
function fitting(ctx, text, room) {
  let length = Math.min(text.length, 60);
  const cut = () => length < text.length ? `${text.slice(0, length)}…` : text;
  while (length > 1 && ctx.measureText(cut()).width > room) length--;
  return cut();
}

class Lanes {
  constructor(lanes, chart, root) {
    this.lanes = lanes;
    this.chart = chart;
    this.height = Math.max(3, Math.min(18, Math.floor(360 / lanes.length)));
    this.canvas = make("canvas", { className: "lanes" });
    const used = new Set(lanes.flatMap((lane) => lane.spans.map((span) => span.kind)));
    const legend = make("div", { className: "legend" });
    for (const [kind, [colour, words]] of Object.entries(KINDS)) {
      if (!used.has(kind)) continue;
      const swatch = make("i", {});
      swatch.style.background = colour;
      legend.append(make("span", {}, swatch, words));
    }
    root.append(this.canvas, legend);
    this.canvas.addEventListener("mousemove", (event) => {
      chart.view.later(() => this.pointed(event.offsetX, event.offsetY));
    });
    this.canvas.addEventListener("click", (event) => {
      chart.view.pinned = false;
      this.pointed(event.offsetX, event.offsetY);
      chart.view.pinned = true;
    });
    this.canvas.addEventListener("wheel", (event) => chart.wheel(event), { passive: false });
  }

  draw() {
    const { plot, view } = this.chart;
    const ratio = window.devicePixelRatio || 1;
    const height = this.lanes.length * this.height + 4;
    this.canvas.width = plot.width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${plot.width}px`;
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const left = plot.bbox.left / ratio, width = plot.bbox.width / ratio;
    this.left = left;
    this.width = width;
    const x = (at) => left + (at - view.from) / (view.until - view.from) * width;
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.lanes.forEach((lane, i) => {
      const top = i * this.height + 2, middle = top + this.height / 2;
      ctx.fillStyle = style("--faint");
      ctx.textAlign = "right";
      if (this.height >= 12) ctx.fillText(fitting(ctx, lane.name, left - 8), left - 6, middle);
      ctx.textAlign = "left";
      let drawn = left;
      for (const span of lane.spans) {
        if (span.until < view.from || span.from > view.until) continue;
        const right = Math.min(left + width, x(span.until));
        // Spans that would share a pixel are drawn as one.
        const start = Math.max(left, x(span.from), drawn - 0.5);
        if (right < drawn + 0.25 && right < left + width) continue;
        const wide = Math.max(0.5, right - start - (right - start > 4 ? 0.5 : 0));
        ctx.fillStyle = KINDS[span.kind][0];
        ctx.fillRect(start, top, wide, this.height - 1);
        drawn = right;
        if (this.height >= 12 && wide > 40) {
          ctx.save();
          ctx.beginPath();
          ctx.rect(start, top, wide - 3, this.height);
          ctx.clip();
          ctx.fillStyle = "#ffffff";
          ctx.fillText(span.name, start + 3, middle);
          ctx.restore();
        }
      }
    });
  }

  /** Says what is under the pointer. */
  pointed(left, top) {
    const { chart } = this, { view } = chart;
    const lane = this.lanes[Math.floor((top - 2) / this.height)];
    if (view.pinned || !lane) return;
    const at = view.from + (left - this.left) / this.width * (view.until - view.from);
    const near = (view.until - view.from) / this.width;
    const span = lane.spans.find((span) => span.from - near <= at && at < span.until + near);
    if (!span) return;
    const moved = span.bytes === undefined ? "" : `, ${bytes(span.bytes)}`;
    view.say([make("p", { className: "span" }, make("b", {}, span.name),
      `: ${KINDS[span.kind][1]}${moved}, from ${chart.position(span.from)} to ` +
      `${chart.position(span.until)}, ${chart.position(span.until - span.from)} long`)]);
  }
}
