// The page: figures, a tab for each view, its charts and tables.

const page = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const KEYS = "Zoom: drag, wheel, + and −. Move: arrows, shift and wheel. " +
  "Whole: Home or double click. P: the peak. /: search. Click: hold what is listed; Esc: let go.";

/** A tab: charts with one range, what is pointed at, tables. */
class View {
  constructor(form, root) {
    this.root = root;
    this.end = Math.max(1, ...form.charts.map((chart) => chart.end));
    this.from = 0;
    this.until = this.end;
    this.pinned = false;
    root.append(make("p", { className: "faint" }, form.about));
    const tools = make("div", { className: "tools" });
    if (form.charts.length) root.append(tools);
    this.charts = form.charts.map((chart) => new Chart(chart, this, root));
    this.panel = make("div", { className: "panel" });
    if (form.charts.length) {
      this.controls(tools);
      root.append(make("p", { className: "faint" }, KEYS), this.panel);
    }
    form.tables.forEach((table) => root.append(...tabled(table)));
    this.show(0, this.end);
  }

  controls(tools) {
    const button = (text, action) => {
      const made = make("button", { type: "button" }, text);
      made.addEventListener("click", action);
      tools.append(made);
    };
    this.peaks = this.charts.flatMap((chart) => chart.form.peaks.map((peak) => [chart, peak]));
    for (const [chart, peak] of this.peaks) {
      button(`peak ${peak.name}: ${chart.value(peak.value)}`, () => this.peak(chart, peak));
    }
    button("whole", () => this.show(0, this.end));
    button("+", () => this.zoom(0.5));
    button("−", () => this.zoom(2));
    const searched = this.charts.find(({ living }) => living && living.texts.length);
    if (!searched) return;
    this.input = make("input", { type: "search", placeholder: "search names, modules, lines (/)" });
    this.input.setAttribute("aria-label", "search names, modules and lines");
    this.input.addEventListener("input", () => searched.living.search(this.input.value));
    tools.append(this.input);
  }

  /** Shows the peak, and enough around it to see it. */
  peak(chart, { at }) {
    const span = Math.min(this.until - this.from, Math.max(this.end / 20, 40));
    this.show(at - span / 2, at + span / 2);
    this.pinned = true;
    chart.look(at, null);
  }

  show(from, until) {
    const span = Math.min(this.end, Math.max(until - from, Math.min(4, this.end)));
    this.from = Math.max(0, Math.min(from, this.end - span));
    this.until = this.from + span;
    this.charts.forEach((chart) => chart.show());
  }

  zoom(factor, around = (this.from + this.until) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.until - around) * factor);
  }

  /** Moves by a share of what is shown. */
  move(share) {
    const by = (this.until - this.from) * share;
    this.show(this.from + by, this.until + by);
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      Home: () => this.show(0, this.end),
      p: () => { if (this.peaks.length) this.peak(...this.peaks[0]); },
      "/": () => { if (this.input) this.input.focus(); },
      Escape: () => this.release(),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  release() {
    this.pinned = false;
    this.charts.forEach((chart) => { chart.chosen = null; chart.instant = undefined; });
    this.charts.forEach((chart) => chart.redraw());
    this.say([]);
  }

  say(elements) { this.panel.replaceChildren(...elements); }

  /** Runs the last of several actions that come within a frame. */
  later(action) {
    if (!this.waiting) requestAnimationFrame(() => { this.waiting(); this.waiting = null; });
    this.waiting = action;
  }

  resize() { this.charts.forEach((chart) => chart.resize(this.root.clientWidth)); }

  redraw() { this.charts.forEach((chart) => chart.redraw()); }
}

/** The cells of a table by the kind of their column. */
const SHOWN = {
  text: (value) => value, count, nanos: (value) => nanos(value),
  bytes: (value) => `${bytes(value)}`,
  share: (value) => {
    const part = make("i", { className: value > 1000 ? "over" : "" });
    part.style.width = `${Math.min(100, value / 10)}%`;
    return make("div", { className: "bar", title: `${(value / 10).toFixed(1)} %` }, part);
  },
};
/** The rows that a table shows until more are asked for. */
const ROWS = 25;

function tabled(form) {
  const cell = (value, [, kind]) => {
    const number = kind !== "text" && kind !== "share";
    const shown = value === null ? "–" : SHOWN[kind](value);
    const made = make("td", { className: number ? "number" : "" }, shown);
    if (kind === "bytes" && value !== null) made.title = `${count(value)} bytes`;
    return made;
  };
  const body = make("tbody", {});
  let rows = form.rows.slice(), shown = ROWS;
  const more = make("button", { type: "button" });
  const fill = () => {
    body.replaceChildren(...rows.slice(0, shown).map((row) =>
      make("tr", {}, ...row.map((value, i) => cell(value, form.columns[i])))));
    more.hidden = rows.length <= shown;
    more.textContent = `all ${count(rows.length)} rows`;
  };
  more.addEventListener("click", () => { shown = Infinity; fill(); });
  const head = form.columns.map(([name, kind], i) => {
    const button = make("button", { type: "button", title: "Sort" }, name);
    let down = kind !== "text";
    button.addEventListener("click", () => {
      const sign = down ? -1 : 1;
      // What is unknown comes last.
      const order = (a, b) => {
        if (a === b) return 0;
        if (a === null || b === null) return a === null ? 1 : -1;
        return a < b ? -sign : sign;
      };
      rows = rows.slice().sort((a, b) => order(a[i], b[i]));
      down = !down;
      fill();
    });
    return make("th", { className: kind === "text" || kind === "share" ? "" : "number" }, button);
  });
  fill();
  return [make("h2", {}, form.name), make("div", { className: "scroll" },
    make("table", {}, make("thead", {}, make("tr", {}, ...head)), body)), more];
}

/** The figures of the report that are numbers or words by themselves. */
function figures(report) {
  const words = (key) => {
    const plain = key.replace(/_(bytes|ns|s)$/, "");
    return (plain in report && plain !== key ? key : plain).replaceAll("_", " ");
  };
  const plain = ([, value]) => value !== null && typeof value !== "object";
  const rows = Object.entries(report).filter(plain);
  return make("table", { className: "figures" }, make("tbody", {}, ...rows.map(([key, value]) => {
    const short = byKey(key, value);
    const exact = typeof value === "number" ? count(value) : String(value);
    const unit = key.match(/_(bytes|ns|s)$/);
    return make("tr", {}, make("th", {}, words(key)),
      make("td", { className: typeof value === "number" ? "number" : "" }, short || exact),
      make("td", { className: "number" }, short ? make("small", {}, `${exact} ${unit[1]}`) : ""));
  })));
}

function build() {
  document.querySelector("h1").textContent = page.title;
  const about = make("details", { open: !page.views.length }, make("summary", {}, "figures"),
    figures(page.report));
  main.append(about, ...page.notes.map((note) => make("p", { className: "faint" }, note)));
  const tabs = make("div", {});
  tabs.setAttribute("role", "tablist");
  main.append(tabs);
  const views = [];
  const panels = page.views.map((form, i) => {
    const root = make("section", { hidden: true });
    root.setAttribute("role", "tabpanel");
    const tab = make("button", { type: "button" }, form.name);
    tab.setAttribute("role", "tab");
    tab.addEventListener("click", () => open(i));
    tabs.append(tab);
    main.append(root);
    return { form, root, tab };
  });
  const open = (chosen) => {
    panels.forEach(({ root, tab }, i) => {
      root.hidden = i !== chosen;
      tab.setAttribute("aria-selected", String(i === chosen));
    });
    // A view is built when it is first looked at.
    views[chosen] ||= new View(panels[chosen].form, panels[chosen].root);
    views[chosen].resize();
    views[chosen].redraw();
  };
  if (panels.length) open(0);
  const every = (action) => {
    views.filter((view) => view && !view.root.hidden).forEach(action);
  };
  window.addEventListener("resize", () => every((view) => view.resize()));
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, .chart")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    every((view) => view.key(event));
  });
  const theme = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    every((view) => view.redraw());
  };
  document.getElementById("theme").addEventListener("click", () => {
    theme(getComputedStyle(document.documentElement).colorScheme !== "dark");
  });
  const redraw = () => every((view) => view.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const made = document.querySelector("meta[name=generator]").content;
  document.querySelector("footer").textContent =
    `${page.command} · ${made} · charts by uPlot (MIT), its licence is in this file`;
}

build();
