/* Small charts that several parts of the page show: histograms and the ranges of channels. All colours are variables of
   the style sheet, so that a chart follows the theme without being drawn again. */

const charts = {};

for (const [kind, look] of Object.entries(data.looks)) {
  document.documentElement.style.setProperty(`--kind-${kind}`, look.colour);
  document.documentElement.style.setProperty(`--ink-${kind}`, look.ink);
}

/** Options that all charts share. @param {HTMLElement} host  @param {any} options */
function plot(host, options) {
  return Plot.plot({
    width: Math.max(host.clientWidth || 320, 160),
    ...options,
    style: { background: "transparent", color: "var(--ink)", fontSize: "11px", fontFamily: "inherit", overflow: "visible", ...options.style },
  });
}

/** Draw now, and again when the width has changed. @param {HTMLElement} host  @param {() => void} draw  fills the host */
function fitted(host, draw) {
  let width = host.clientWidth;
  draw();
  new ResizeObserver(() => {
    if (!host.clientWidth || Math.abs(host.clientWidth - width) < 8) return; // hidden, or a scroll bar
    width = host.clientWidth;
    host.replaceChildren();
    draw();
  }).observe(host);
}

/** A number of the data, in which what is not finite stands as text. @param {number|string|null|undefined} value */
const numeric = (value) =>
  value === null || value === undefined ? null : typeof value === "number" ? value : Number(value.replace("inf", "Infinity"));

/** Decibels as a bare number; nothing where there is none. @param {number|string|null|undefined} value */
function inDecibels(value) {
  const number = numeric(value);
  if (number === null) return "";
  return number === Infinity ? "exact" : Number.isFinite(number) ? number.toFixed(1) : String(value);
}

/** The same with the unit. */
const withUnit = (value) => inDecibels(value).replace(/\d$/, "$& dB") || "–";

/** A share as a percentage with two or three digits: 12 %, 0.032 %. @param {number} share */
function percent(share) {
  const value = 100 * share;
  return `${value === 0 || value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : Number(value.toPrecision(2))} %`;
}

/** A count of things with a unit letter: 118M. @type {(value: number) => string} */
const counted = d3.format(".3~s");

/** Noise by signal of an SQNR: 1 is as much noise as signal; null where that is no number. @param {number|string|null} value  in dB */
function noise(value) {
  const share = value === null || value === undefined ? NaN : 10 ** (-numeric(value) / 10);
  return Number.isFinite(share) ? share : null;
}

/** Equal bins over [low, high]. @param {number[]} counts */
function bins(counts, low, high) {
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const width = (high - low) / counts.length;
  return counts.map((count, i) => ({ count, x1: low + i * width, x2: low + (i + 1) * width }));
}

/** The values of a layer: bars, the clip range as lines, what lies outside it in another colour and with its share.
 * @param {HTMLElement} host
 * @param {{low: number, high: number, counts: number[], clip: [number, number]|null, outside: number}} values */
charts.histogram = (host, values) => {
  const { low, high, clip } = values;
  const data = bins(values.counts, low, high);
  const out = (bin) => clip !== null && (bin.x2 <= clip[0] || bin.x1 >= clip[1]);
  const most = Math.max(...values.counts, 1);
  host.append(
    plot(host, {
      height: 130,
      marginLeft: 8,
      marginRight: 8,
      marginTop: 18,
      x: { label: null, domain: clip ? [Math.min(low, clip[0]), Math.max(high, clip[1])] : undefined, ticks: 5, tickFormat: short },
      y: { axis: null, type: "sqrt", domain: [0, most] },
      marks: [
        Plot.rectY(data, { x1: "x1", x2: "x2", y: "count", fill: (bin) => (out(bin) ? "var(--warn)" : "var(--chart)"), insetLeft: 0.5 }),
        Plot.ruleY([0], { stroke: "var(--line)" }),
        clip && Plot.ruleX(clip, { stroke: "var(--warn)", strokeWidth: 1.5, strokeDasharray: "4,3" }),
        clip && Plot.text(clip, { x: (d) => d, y: most, text: short, dy: -10, fill: "var(--warn)" }),
      ],
      ariaLabel: "histogram of the values",
    }),
  );
  const range = `${short(low)} to ${short(high)}`;
  const clipped = clip ? `; clipped to ${short(clip[0])} … ${short(clip[1])}, ${values.outside ? percent(values.outside) : "nothing"} outside` : "";
  host.append(el("p.note", `values ${range}${clipped} (heights by square root)`));
};

/** The weights of a layer: smallest and largest of each channel, and a histogram of all of them.
 * @param {HTMLElement} host
 * @param {{axis: number|null, low: number[], high: number[], scale: number[], counts: number[], range: [number, number]}} weights */
charts.channels = (host, weights) => {
  const count = weights.low.length;
  if (count > 1) {
    const channels = weights.low.map((low, i) => ({ i, low, high: weights.high[i], scale: weights.scale[i] }));
    host.append(
      plot(host, {
        height: 120,
        marginLeft: 44,
        marginTop: 8,
        x: { label: `channel (axis ${weights.axis})`, domain: [-0.5, count - 0.5], ticks: Math.min(5, count), tickFormat: "d" },
        y: { label: null, ticks: 4, tickFormat: short, grid: true },
        marks: [
          Plot.ruleY([0], { stroke: "var(--line)" }),
          Plot.rect(channels, { x1: (d) => d.i - 0.5, x2: (d) => d.i + 0.5, y1: "low", y2: "high", fill: "var(--chart)" }),
          Plot.tip(channels, Plot.pointerX({ x: "i", y: "high", title: (d) => `channel ${d.i}\n${short(d.low)} … ${short(d.high)}\nscale ${short(d.scale)}`, ...tipLook })),
        ],
        ariaLabel: "smallest and largest weight of each channel",
      }),
    );
  }
  const widths = weights.high.map((high, i) => Math.max(Math.abs(high), Math.abs(weights.low[i]))).filter((width) => width > 0);
  const spread = widths.length > 1 ? `; the widest channel is ${short(Math.max(...widths) / Math.min(...widths))}× the narrowest` : "";
  charts.histogram(host, { low: weights.range[0], high: weights.range[1], counts: weights.counts, clip: null, outside: 0 });
  host.append(el("p.note", `${count} ${count === 1 ? "scale, for the whole tensor" : "channels, a scale each"}${spread}`));
};

/** How the box that follows the pointer looks. */
const tipLook = { fill: "var(--paper)", stroke: "var(--line)", lineHeight: 1.3, fontSize: 11 };

/** Bars to the right with a name on their left and a number behind them, in HTML: text wraps, and can be selected.
 * @param {{name: string, value: number, text: string, colour?: string, tag?: string, title?: string, onclick?: () => void}[]} rows
 * @param {string} label  what they are, for who cannot see them */
function bars(rows, label) {
  const most = Math.max(...rows.map((row) => row.value), 1e-12);
  return el(
    "div.bars",
    { role: "list", "aria-label": label },
    ...rows.map((row) => {
      const bar = el("span.bar");
      bar.style.width = `${(100 * row.value) / most}%`;
      if (row.colour) bar.style.background = row.colour;
      const name = row.onclick ? el("button.link", { onclick: row.onclick }, row.name) : el("span", row.name);
      return el(
        "div.barrow",
        { role: "listitem", title: row.title ?? null },
        el("span.barname", name, row.tag ? el("span.tag", row.tag) : null),
        el("span.barplace", bar, el("span.barvalue", row.text)),
      );
    }),
  );
}
