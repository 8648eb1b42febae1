/* The Quality tab: how far every layer is from the float model, and how much of that it adds itself. */

/** Show the node that a row of the ledger became, in the graph after the last pass. @param {any} row */
const showNode = (row) => go({ tab: "graph", pass: "", node: row.into || row.name });

/** The rows that have an SQNR, with their noise taken apart. A layer goes by the op of its unit that has the most to do:
 * the row with the SQNR is that of the last one, often an activation. @param {any[]} rows */
function layersOf(rows) {
  const main = new Map();
  for (const row of rows) if (row.into && row.precision !== "folded" && row.macs > (main.get(row.into)?.macs ?? 0)) main.set(row.into, row);
  const named = (row) => main.get(row.into) ?? row;
  return rows
    .filter((row) => row.sqnr !== null && row.sqnr !== undefined)
    .map((row, i) => {
      const total = noise(row.sqnr);
      const alone = noise(row.own_sqnr);
      const own = alone === null || total === null ? null : Math.min(alone, total);
      return { row, i, total, own, inherited: own === null ? total : total - own, dB: numeric(row.sqnr), name: named(row).path || named(row).name, op: named(row).op };
    });
}

/** A number that stands out, with what it is. */
const tile = (value, what, help = null) => el("div.tile", help ? { title: help } : {}, el("strong", value), el("span", what));

function qualityTiles(layers, all) {
  const { ledger } = all;
  const int8 = layers.filter((layer) => layer.row.precision !== "float");
  const precisions = counts(ledger.rows.map((row) => row.precision));
  const worst = d3.least(int8, (layer) => layer.dB);
  return el(
    "div.tiles",
    tile(withUnit(ledger.output_sqnr), "SQNR of the output", `against the float model: 10 log10(signal / noise), on ${all.measured}`),
    tile(percent(ledger.coverage), "of the multiply-accumulates in int8"),
    precisions.has("weight-only") ? tile(percent(ledger.weight_coverage), "of them in float with integer weights") : null,
    tile(`${(precisions.get("int8") ?? 0) + (precisions.get("moves") ?? 0)} : ${precisions.get("float") ?? 0}`, "ops on integers : in float"),
    worst ? tile(withUnit(worst.row.sqnr), `worst: ${worst.name}`) : null,
  );
}

const LABELS = 98; // height of the names below a chart

/** How wide a layer is in the charts: all fit where they can, else the charts scroll. */
function stepFor(host, count) {
  const fit = (host.clientWidth - 90) / Math.max(count, 1);
  return Math.max(fit, count > 400 ? 3 : 11);
}

/** The x axis: the name of every layer where there is room, else where a part of the model begins. */
function layerAxis(layers, step) {
  const first = (layer) => layer.name.split(".")[0];
  const named = step >= 11 ? layers : layers.filter((layer, i) => i === 0 || first(layer) !== first(layers[i - 1]));
  const kept = [];
  for (const layer of named) if (!kept.length || (layer.i - kept.at(-1).i) * step >= 11) kept.push(layer);
  return Plot.axisX(kept.map((layer) => layer.i), {
    tickFormat: (i) => ellipsis(step >= 11 ? layers[i].name : first(layers[i]), 17),
    tickRotate: -60,
    tickSize: 3,
    label: null,
    fontSize: 10,
  });
}

const ellipsis = (text, most) => (text.length <= most ? text : `…${text.slice(1 - most)}`);

function layerTip(layer) {
  const { row } = layer;
  const lines = [`${layer.name}  (${layer.op}, ${row.precision})`, `SQNR ${withUnit(row.sqnr)}${layer.total === null ? "" : `: ${percent(layer.total)} noise`}`];
  if (layer.own !== null) lines.push(`its own ${percent(layer.own)}, inherited ${percent(layer.inherited)}`);
  if (row.reason) lines.push(row.reason);
  return lines.join("\n");
}

/** A chart over the layers; a click shows the layer under the pointer in the graph. */
function layerChart(host, layers, step, options) {
  const chart = plot(host, {
    width: 90 + layers.length * step,
    marginLeft: 64,
    marginRight: 20,
    ...options,
    x: { domain: [-0.5, layers.length - 0.5], label: null },
    marks: [
      Plot.ruleX(layers, Plot.pointerX({ x: "i", stroke: "var(--quiet)", strokeWidth: Math.max(step - 2, 1), strokeOpacity: 0.18 })),
      ...options.marks,
      options.marginBottom ? layerAxis(layers, step) : Plot.axisX([]),
      Plot.tip(layers, Plot.pointerX({ x: "i", y: options.tipAt, title: options.tip ?? layerTip, ...tipLook })),
    ],
  });
  chart.classList.add("clickable");
  chart.addEventListener("click", () => chart.value && showNode(chart.value.row));
  return chart;
}

function sqnrChart(host, layers, step) {
  const alone = (layer) => numeric(layer.row.own_sqnr);
  const known = [...layers.map((layer) => layer.dB), ...layers.map(alone)].filter(Number.isFinite);
  const top = 5 + Math.max(...known, 45); // where exact layers are drawn
  const place = (dB) => (dB === Infinity ? top : Number.isFinite(dB) ? dB : Math.min(...known, 0));
  const height = (layer) => place(layer.dB);
  const colour = (layer) => `var(--kind-${layer.row.precision})`;
  return layerChart(host, layers, step, {
    height: 250,
    marginBottom: LABELS,
    tipAt: height,
    y: { label: "SQNR, dB", grid: true, nice: true, zero: true },
    symbol: { domain: ["int8", "weight-only", "moves", "float", "folded"], range: ["circle", "triangle", "square", "diamond", "cross"] },
    marks: [
      Plot.line(layers, { x: "i", y: (d) => (alone(d) === null ? NaN : place(alone(d))), stroke: "var(--noise-own)", strokeWidth: 1.5, strokeDasharray: "4,2" }),
      Plot.line(layers, { x: "i", y: height, stroke: "var(--quiet)", strokeWidth: 1 }),
      Plot.dot(layers, { x: "i", y: height, symbol: (d) => d.row.precision, stroke: colour, fill: (d) => (d.dB === Infinity ? "var(--paper)" : colour(d)), r: Math.min(step / 3, 5) }),
    ],
    ariaLabel: "SQNR of each layer in execution order",
  });
}

/** Bars of noise in parts, each `[variable of its colour, from, to]` of a layer. */
function noiseChart(host, layers, step, parts, options) {
  const half = Math.min(0.38, 18 / step);
  const drawn = layers.flatMap((layer) => parts(layer).map(([variable, y1, y2]) => ({ i: layer.i, variable, y1, y2 }))).filter((part) => part.y2 > part.y1);
  return layerChart(host, layers, step, {
    tipAt: (layer) => Math.max(0, ...parts(layer).map(([, , y2]) => y2)),
    y: { label: options.label, grid: true, ticks: 4, tickFormat: percent, zero: true },
    marks: [
      Plot.rect(drawn, { x1: (p) => p.i - half, x2: (p) => p.i + half, y1: "y1", y2: "y2", fill: (p) => `var(--${p.variable})` }),
      Plot.ruleY([0], { stroke: "var(--quiet)" }),
    ],
    ...options,
  });
}

const inParts = (layer) => [["noise-inherited", 0, layer.inherited], ["noise-own", layer.inherited, layer.total]];
const onlyOwn = (layer) => [["noise-own", 0, layer.own ?? 0]];

/** A swatch and its meaning. */
const legendOf = (...entries) =>
  el("div.keys", ...entries.map(([variable, text, mark = ""]) => el("span", swatchOf(variable, mark), text)));

function swatchOf(variable, mark) {
  const made = el(`i.swatch${mark ? `.${mark}` : ""}`);
  made.style.background = `var(--${variable})`;
  return made;
}

const HELP_NOISE =
  "The noise of a layer is 10^(−SQNR/10), its share of the signal. Its own part is the noise that it makes when it gets the float model's " +
  "values; the rest, total − own and never below zero, came in with its inputs.";

const FATE_LEGEND = [
  ["kind-int8", "int8", "round", "int8"],
  ["kind-weight-only", "integer weight", "triangle", "weight-only"],
  ["kind-moves", "moves integers", "", "moves"],
  ["kind-float", "float", "diamond", "float"],
];

const HOLLOW = "Hollow at the top: exact, no difference at all.";

function renderQuality(host, all) {
  host.classList.add("sheet");
  const layers = layersOf(all.ledger.rows);
  host.append(qualityTiles(layers, all));
  if (!layers.length) {
    host.append(el("p.empty", "No SQNR is on record: the float and the int8 model did not both run on recorded calibration samples."));
    return;
  }
  const split = layers.some((layer) => layer.own !== null);
  const charted = el("div.scroll");
  host.append(
    el("h2", `SQNR of each layer, in execution order, on ${all.measured}`),
    legendOf(...FATE_LEGEND.filter(([, , , precision]) => layers.some((layer) => layer.row.precision === precision)), ...(split ? [["noise-own", "the layer alone: had it got the float model's values", "dash"]] : [])),
    layers.some((layer) => layer.dB === Infinity) ? el("p.note", HOLLOW) : "",
    charted,
  );
  const step = stepFor(charted, layers.length);
  charted.append(sqnrChart(host, layers, step));
  if (!layers.some((layer) => layer.total > 0)) return;
  host.append(
    el("h2", "Where the noise comes from"),
    split ? legendOf(["noise-own", "added by the layer itself"], ["noise-inherited", "inherited from its inputs"]) : "",
    el("p.note", `${split ? HELP_NOISE : "The noise of a layer is 10^(−SQNR/10), its share of the signal."} Click a layer to see it in the graph.`),
  );
  const below = el("div.scroll");
  host.append(below);
  const label = "noise / signal";
  if (!split) below.append(noiseChart(host, layers, step, inParts, { label, height: 240, marginBottom: LABELS, ariaLabel: "noise of each layer" }));
  else
    below.append(
      noiseChart(host, layers, step, inParts, { label, height: 190, ariaLabel: "noise of each layer: inherited, and added by itself" }),
      noiseChart(host, layers, step, onlyOwn, { label: "its own part alone", height: 210, marginBottom: LABELS, ariaLabel: "noise that each layer adds itself" }),
    );
  host.append(worst(layers, split), about(all));
}

/** What made the model. */
const about = (all) =>
  el("details.about", el("summary", "Recipe"), el("pre", all.recipe), el("p.note", `fxq ${all.fxq}, backend ${all.backend}`));

/** The layers that cost most, as bars. */
function worst(layers, split) {
  const by = (value, title) =>
    el(
      "section",
      el("h2", title),
      bars(
        layers
          .filter((layer) => value(layer) > 0)
          .sort((a, b) => value(b) - value(a))
          .slice(0, 8)
          .map((layer) => ({
            name: layer.name,
            tag: layer.op,
            value: value(layer),
            text: percent(value(layer)),
            colour: `var(--kind-${layer.row.precision})`,
            onclick: () => showNode(layer.row),
          })),
        title,
      ),
    );
  return el("div.columns", by((layer) => layer.total, "Most noise in their output"), split ? by((layer) => layer.own, "Adding most noise themselves") : null);
}

tabs.push({ id: "quality", title: "Quality", render: (host, all) => fitted(host, () => renderQuality(host, all)) });
