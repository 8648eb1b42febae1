/* The Time tab: float against int8, and where the time goes. */

/** Float and int8 as two bars, and how many times one is the other. */
function against(title, real, int8, text, better, worse, why) {
  const rows = [];
  if (real !== null) rows.push({ name: "float", value: real, text: text(real), colour: "var(--quiet)" });
  if (int8 !== null) rows.push({ name: "int8", value: int8, text: text(int8), colour: "var(--kind-int8)" });
  const times = real !== null && int8 !== null && real > 0 && int8 > 0 ? real / int8 : null;
  const words = times === null ? null : times >= 1 ? `${times.toFixed(2)}× ${better}` : `${(1 / times).toFixed(2)}× ${worse}`;
  return el(
    "section.card",
    el("h2", title),
    words ? el("p.headline", words) : null,
    rows.length ? bars(rows, title) : null,
    why ? el("p.note", `Not timed: ${why}.`.replace("..", ".")) : null,
  );
}

/** Time by op: the sum over its nodes, kinds apart. A kernel goes by the ops that it runs. */
function byOp(ops) {
  const { byName } = graphOf(passes.length - 1);
  const nameOf = (op) => (isLayer(op) ? op.label : (byName.get(op.name)?.body ?? []).map(plainOp).join(" + ") || op.label);
  const groups = d3.groups(ops, (op) => `${op.kind} ${op.label} ${nameOf(op)}`).map(([, found]) => found);
  const sums = groups.map((found) => ({ ...found[0], name: nameOf(found[0]), us: d3.sum(found, (op) => op.us), count: found.length }));
  return sums.sort((a, b) => b.us - a.us);
}

/** Whether it is one of the layers that an engine runs of a node. */
const isLayer = (op) => (graphOf(passes.length - 1).byName.get(op.name)?.layers.length ?? 0) > 0;

/** An op without its options. @param {string} text */
const plainOp = (text) => text.replace(/\(.*$/s, "");

const kindColour = (kind) => `var(--kind-${kind})`;
const tagOf = (kind) => data.looks[kind]?.tag ?? kind;

/** One bar for all the time, in parts by kind. */
function shareBar(ops, total) {
  const sums = d3.rollup(ops, (found) => d3.sum(found, (op) => op.us), (op) => op.kind);
  const parts = new Map([...sums].filter(([, us]) => us > 0.0005 * total));
  const told = (kind) => `${tagOf(kind)} ${percent(parts.get(kind) / total)} (${duration(parts.get(kind))})`;
  const bar = kindsBar(parts, "div.share", (kind) => ({ title: told(kind), text: parts.get(kind) > 0.06 * total ? tagOf(kind) : null }));
  const kinds = Object.keys(data.looks).filter((kind) => parts.has(kind));
  bar.role = "img";
  bar.ariaLabel = kinds.map(told).join(", ");
  return el("div", bar, legendOf(...kinds.map((kind) => [`kind-${kind}`, told(kind)])));
}

function renderTime(host, all) {
  host.classList.add("sheet");
  const { time, size } = all;
  const ops = time.ops;
  host.append(
    el(
      "div.columns",
      against("Latency", time.float_us, time.int8_us, duration, "faster than float", "slower than float", time.why),
      against("Size", size.float_bytes, size.int8_bytes, (bytes) => counted(bytes).replace(/([kMGT]?)$/, " $1B"), "smaller than float", "larger than float", ""),
    ),
  );
  if (time.batch) host.append(el("p.note", `Medians of a few calls on ${time.batch}, measured when this report was written; float and int8 in turns, the float model eager and in the memory format that it has.`));
  if (!ops.length) return;
  const total = d3.sum(ops, (op) => op.us);
  host.append(el("h2", `Where the time goes: ${duration(total)} in ${ops.length} ${ops.some(isLayer) ? "nodes and layers" : "nodes"}`), shareBar(ops, total));
  host.append(el("p.note", "Each node of the int8 model on its own, of a region the layers that its engine runs; the sum leaves out what the model's forward costs around them."));
  const sums = byOp(ops);
  const barOf = (us) => ({ value: us, text: `${duration(us)}  ${percent(us / total)}` });
  host.append(
    el(
      "div.columns",
      el("section", el("h2", "By op"),
        bars(sums.slice(0, 16).map((op) => ({ name: op.name, title: op.label, tag: `${tagOf(op.kind)} ×${op.count}`, colour: kindColour(op.kind), ...barOf(op.us) })), "time by op")),
      el("section", el("h2", "Most costly nodes"),
        bars([...ops].sort((a, b) => b.us - a.us).slice(0, 16).map((op) => ({
          name: op.layer || op.name, tag: `${op.label} · ${tagOf(op.kind)}`, colour: kindColour(op.kind), onclick: () => go({ tab: "graph", pass: "", node: op.name }), ...barOf(op.us) })), "most costly nodes")),
    ),
  );
}

tabs.push({ id: "time", title: "Time", render: renderTime });
