/* The page of two quantized models: their layers side by side, and their graphs in the Graph tab's panes. */

/** The rows of a comparison with what the ledgers know: `into` in b's graph, reasons and lines of both sides. */
function pairsOf(all) {
  const [a, b] = all.sides.map((side) => new Map(side.ledger.rows.map((row) => [row.name, row])));
  const names = new Map(layersOf(all.sides[1].ledger.rows).map((layer) => [layer.row.name, layer]));
  return all.rows.map((row, i) => {
    const named = names.get(row.name);
    const [dBa, dBb] = [numeric(row.sqnr_a), numeric(row.sqnr_b)];
    const gain = Number.isFinite(dBa) && Number.isFinite(dBb) ? dBb - dBa : null;
    return { row: { ...row, into: b.get(row.name)?.into ?? "" }, i, name: named?.name ?? (row.path || row.name), op: named?.op ?? row.op, a: a.get(row.name), b: b.get(row.name), dBa, dBb, gain };
  });
}

const sideTip = (pair) =>
  [`${pair.name}  (${pair.op})`, `a, ${pair.row.precision_a}: ${withUnit(pair.row.sqnr_a)}`, `b, ${pair.row.precision_b}: ${withUnit(pair.row.sqnr_b)}`, `b against a: ${withUnit(pair.row.sqnr)}`].join("\n");

/** The SQNR of both against the float model, on recorded samples: as their ledgers have it. */
function sidesChart(host, pairs, step) {
  const known = pairs.flatMap((pair) => [pair.dBa, pair.dBb]).filter(Number.isFinite);
  const top = 5 + Math.max(...known, 45);
  const place = (dB) => (dB === null ? NaN : dB === Infinity ? top : Number.isFinite(dB) ? dB : 0);
  const [ya, yb] = [(pair) => place(pair.dBa), (pair) => place(pair.dBb)];
  const r = Math.min(step / 3, 4.5);
  return layerChart(host, pairs, step, {
    height: 270,
    marginBottom: LABELS,
    tip: sideTip,
    tipAt: (pair) => Math.max(ya(pair) || 0, yb(pair) || 0),
    y: { label: "SQNR against float, dB", grid: true, nice: true, zero: true },
    marks: [
      Plot.ruleX(pairs, { x: "i", y1: ya, y2: yb, stroke: (pair) => ((pair.gain ?? 0) < 0 ? "var(--side-a)" : "var(--side-b)"), strokeOpacity: 0.5, strokeWidth: 2 }),
      Plot.line(pairs, { x: "i", y: ya, stroke: "var(--side-a)", strokeWidth: 1 }),
      Plot.line(pairs, { x: "i", y: yb, stroke: "var(--side-b)", strokeWidth: 1 }),
      Plot.dot(pairs, { x: "i", y: ya, fill: "var(--side-a)", symbol: "square", r }),
      Plot.dot(pairs, { x: "i", y: yb, fill: "var(--side-b)", symbol: "circle", r }),
    ],
    ariaLabel: "SQNR of each layer in a and in b",
  });
}

const PAIR_COLUMNS = [
  { key: "order", title: "#", value: (pair) => pair.i + 1, help: "execution order" },
  { key: "layer", title: "layer", value: (pair) => pair.name, help: "module path" },
  { key: "op", title: "op", value: (pair) => pair.op },
  { key: "precision_a", title: "a runs as", value: (pair) => pair.row.precision_a, cell: (pair) => precisionTag(pair.row.precision_a) },
  { key: "precision_b", title: "b runs as", value: (pair) => pair.row.precision_b, cell: (pair) => precisionTag(pair.row.precision_b) },
  { key: "sqnr_a", title: "a to float, dB", value: (pair) => pair.dBa, cell: (pair) => inDecibels(pair.row.sqnr_a), help: "SQNR of a against the float model" },
  { key: "sqnr_b", title: "b to float, dB", value: (pair) => pair.dBb, cell: (pair) => inDecibels(pair.row.sqnr_b), help: "SQNR of b against the float model" },
  { key: "gain", title: "b better by, dB", down: true, value: (pair) => pair.gain, cell: (pair) => (pair.gain === null ? "" : `${pair.gain >= 0 ? "+" : "−"}${Math.abs(pair.gain).toFixed(1)}`) },
  { key: "sqnr", title: "b to a, dB", value: (pair) => numeric(pair.row.sqnr), cell: (pair) => inDecibels(pair.row.sqnr), help: "SQNR of b against a" },
  { key: "cosine", title: "cosine", value: (pair) => numeric(pair.row.cosine), cell: (pair) => numeric(pair.row.cosine).toFixed(5) },
  { key: "max_error", title: "max error", down: true, value: (pair) => numeric(pair.row.max_error), cell: (pair) => short(numeric(pair.row.max_error)), help: "largest difference between a and b" },
];

/** Layers that run as one thing in a and as another in b, with the reasons. */
function fatesApart(pairs) {
  const apart = pairs.filter((pair) => pair.row.precision_a !== pair.row.precision_b);
  if (!apart.length) return el("p.note", "Every layer runs as the same in both.");
  const side = (name, precision, row) => el("span", `${name} `, precisionTag(precision), precision === "float" && row?.reason ? ` ${row.reason}` : "");
  return el("ul.apart", ...apart.map((pair) => el("li", el("button.link", { onclick: () => showNode(pair.row) }, pair.name), side("a", pair.row.precision_a, pair.a), side("b", pair.row.precision_b, pair.b))));
}

function compareTiles(all, pairs) {
  const [a, b] = all.sides;
  const worst = d3.least(pairs, (pair) => numeric(pair.row.sqnr) ?? Infinity);
  return el(
    "div.tiles",
    tile(withUnit(all.output_sqnr), "b's output against a's (SQNR)", `on ${all.measured}`),
    worst ? tile(withUnit(worst.row.sqnr), `furthest apart: ${worst.name}`) : null,
    tile(`${percent(a.ledger.coverage)} : ${percent(b.ledger.coverage)}`, "multiply-accumulates in int8, a : b"),
    tile(String(pairs.filter((pair) => pair.row.precision_a !== pair.row.precision_b).length), "layers that run as something else"),
  );
}

function renderCompare(host, all) {
  host.classList.add("sheet");
  const pairs = pairsOf(all);
  const charted = el("div.scroll");
  host.append(
    compareTiles(all, pairs),
    el("h2", "SQNR of each layer against the float model"),
    legendOf(["side-a", `a: ${all.sides[0].title}`], ["side-b", `b: ${all.sides[1].title}`, "round"]),
    el("p.note", "Each as its own ledger has it, on recorded calibration samples. Click a layer to see it in the graphs."),
    charted,
  );
  if (pairs.length) charted.append(sidesChart(host, pairs, stepFor(charted, pairs.length)));
  const { table } = sortable(PAIR_COLUMNS, pairs, { onclick: (pair) => showNode(pair.row), label: "layers of a and b" });
  host.append(
    el("h2", "What runs as something else"),
    fatesApart(pairs),
    el("h2", `Layer by layer: b against a, on ${all.measured}`),
    el("div.tablebox", table),
    el("h2", "Recipes"),
    el("div.columns", ...all.sides.map((side) => el("section", el("p.note", `${side.name}: ${side.title}`), el("pre.recipe", recipeLines(side, all.sides))))),
  );
}

/** The lines of a recipe; those that the other one does not have stand out. */
function recipeLines(side, sides) {
  const other = new Set(sides.find((one) => one !== side).recipe.split("\n"));
  const lines = side.recipe.split("\n").map((line) => el(line && !other.has(line) ? "mark" : "span", {}, `${line}\n`));
  return el("code", ...lines);
}

tabs.push({ id: "layers", title: "Layers", kinds: ["compare"], render: (host, all) => fitted(host, () => renderCompare(host, all)) });
tabs.push({ id: "graph", title: "Graphs", kinds: ["compare"], render: (host) => renderGraph(host) });
