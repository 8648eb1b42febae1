/* The Tuning tab: what layers cost the output and what they would cost in float, and what a search has tried. It is there
   where the report was given such a table: data.tuning is {search, sensitivity}, each as its to_json, or null. */

/** A scatter chart with a box that follows the pointer. @param {HTMLElement} host  @param {any[]} rows */
function scatter(host, rows, { x, y, label, title, colour, radius = 4, marks = [] }) {
  const place = { x: (d) => x.value(d), y: (d) => y.value(d) };
  host.append(
    plot(host, {
      height: 320,
      marginLeft: 60,
      marginBottom: 40,
      ariaLabel: label,
      x: { label: x.label, grid: true, nice: true, type: x.type },
      y: { label: y.label, grid: true, nice: true },
      marks: [...marks, Plot.dot(rows, { ...place, fill: colour, r: radius }), Plot.tip(rows, Plot.pointer({ ...place, title, ...tipLook }))],
    }),
  );
}

const finite = (value) => value !== null && Number.isFinite(value);

const CANDIDATE_COLUMNS = [
  { key: "order", title: "#", value: (row) => row.order },
  { key: "change", title: "candidate", value: (row) => row.change },
  { key: "score", title: "score", down: true, value: (row) => numeric(row.score), cell: (row) => short(numeric(row.score)), help: "dB, or what the metric says" },
  { key: "reached", title: "enough", value: (row) => (row.reached ? "yes" : "") },
  { key: "floats", title: "layers in float", value: (row) => row.floats },
  { key: "float_macs", title: "float MACs", down: true, value: (row) => row.float_macs, cell: (row) => counted(row.float_macs) },
  { key: "extra_us", title: "costs µs", down: true, value: (row) => row.extra_us, cell: (row) => inMicroseconds(row.extra_us), help: "measured, more than with all of these layers on integers" },
  { key: "front", title: "front", value: (row) => (row.front ? "front" : ""), help: "no other candidate is both better and cheaper" },
  { key: "chosen", title: "", value: (row) => (row.chosen ? "chosen" : "") },
];

function renderSearch(host, found) {
  const rows = found.candidates.map((row, i) => ({ ...row, order: i + 1, y: numeric(row.score) })).filter((row) => finite(row.y));
  const timed = rows.every((row) => row.extra_us !== null);
  const cost = (row) => (timed ? row.extra_us / 1e3 : row.float_macs / 1e6);
  const front = rows.filter((row) => row.front).sort((a, b) => cost(a) - cost(b));
  const least = numeric(found.least);
  const kinds = [["kind-int8", "chosen"], ["noise-own", "on the Pareto front: no other is both better and cheaper"], ["noise-inherited", "others"], ["noise-own", "what was asked for", "dash"]];
  host.append(
    el(
      "div.tiles",
      tile(short(numeric(found.score)), `score; ${short(least)} asked for${found.reached ? "" : ": not reached"}`),
      tile(`${found.floats.length} of ${found.layers}`, "layers in float"),
      tile(String(found.forwards), `candidates judged, ${(found.forwards / Math.max(found.layers, 1)).toFixed(1)} for each layer`),
    ),
    el("h2", "Candidates: how good, and what they cost"),
    legendOf(...kinds),
  );
  scatter(host, rows, {
    x: { value: cost, label: timed ? "milliseconds more than with all on integers" : "multiply-accumulates in float, millions" },
    y: { value: (row) => row.y, label: "score" },
    label: "candidates, score against cost",
    title: (row) => `${row.change}\nscore ${short(row.y)}, ${row.floats} layers in float`,
    colour: (row) => (row.chosen ? "var(--kind-int8)" : row.front ? "var(--noise-own)" : "var(--noise-inherited)"),
    radius: 5,
    marks: [
      finite(least) ? Plot.ruleY([least], { stroke: "var(--noise-own)", strokeDasharray: "5,3" }) : null,
      Plot.line(front, { x: cost, y: (row) => row.y, stroke: "var(--noise-own)", strokeWidth: 1.5 }),
    ],
  });
  host.append(el("div.tablebox", sortable(CANDIDATE_COLUMNS, rows, { label: "candidates" }).table));
}

const LAYER_COLUMNS = [
  { key: "layer", title: "layer", value: (row) => row.path || row.name },
  { key: "op", title: "op", value: (row) => row.op },
  { key: "sqnr", title: "alone dB", value: (row) => numeric(row.sqnr), cell: (row) => inDecibels(row.sqnr), help: "SQNR of the output when this layer alone runs on integers" },
  { key: "share", title: "of the noise", down: true, value: (row) => numeric(row.share), cell: (row) => percent(numeric(row.share)) },
  { key: "macs", title: "MACs", down: true, value: (row) => row.macs || null, cell: (row) => (row.macs ? counted(row.macs) : "") },
  { key: "extra_us", title: "float costs µs", down: true, value: (row) => row.extra_us, cell: (row) => inMicroseconds(row.extra_us), help: "measured, more than on integers" },
  { key: "line", title: "to put it into float", value: (row) => row.line, cell: (row) => copyable(row.line) },
];

function renderSensitivity(host, found) {
  const rows = found.layers.map((row) => ({ ...row, part: numeric(row.share) }));
  const timed = rows.filter((row) => finite(row.part) && row.extra_us !== null);
  host.append(el("h2", `What each layer on integers costs the output, which is at ${withUnit(found.output_sqnr)} with all of them`));
  if (timed.length) {
    host.append(el("p.note", "Layers high up and to the left are those to put into float: much of the noise for little time."));
    scatter(host, timed, {
      x: { value: (row) => row.extra_us / 1e3, label: "milliseconds more in float" },
      y: { value: (row) => 100 * row.part, label: "% of the noise" },
      label: "layers, share of the noise against milliseconds",
      title: (row) => `${row.path || row.name} (${row.op})\n${percent(row.part)} of the noise, ${inMicroseconds(row.extra_us)} µs more in float`,
      colour: "var(--chart)",
      marks: [Plot.text([...timed].sort((a, b) => b.part - a.part).slice(0, 5), { x: (d) => d.extra_us / 1e3, y: (d) => 100 * d.part, text: (d) => ellipsis(d.path || d.name, 28), textAnchor: "start", dx: 8, fill: "var(--quiet)" })],
    });
  }
  const most = [...rows].filter((row) => row.part > 0).sort((a, b) => b.part - a.part).slice(0, 16);
  host.append(
    bars(most.map((row) => ({ name: row.path || row.name, tag: row.op, value: row.part, text: percent(row.part), onclick: () => showNode(row) })), "share of the noise"),
    el("div.tablebox", sortable(LAYER_COLUMNS.filter((c) => c.key !== "extra_us" || timed.length), rows, { onclick: showNode, label: "sensitivity" }).table),
  );
}

function renderTuning(host, all) {
  host.classList.add("sheet");
  if (all.tuning.search) renderSearch(host, all.tuning.search);
  if (all.tuning.sensitivity) renderSensitivity(host, all.tuning.sensitivity);
}

if (data.tuning) tabs.push({ id: "tuning", title: "Tuning", render: (host, all) => fitted(host, () => renderTuning(host, all)) });
