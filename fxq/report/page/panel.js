/* All about the chosen node, on the right; about the pass when none is chosen. */

/** @param {HTMLElement} host */
function makePanel(host) {
  const show = () => {
    const i = chosenPass();
    const name = state.node ?? "";
    const group = name.startsWith("/") ? (graphScene(i).groups.get(name.slice(1)) ?? diffScene(i).groups.get(name.slice(1))) : null;
    const node = graphOf(i).byName.get(name) ?? (i > 0 ? graphOf(i - 1).byName.get(name) : undefined);
    const [at, about] = (!group && !node && foundInside(i, name)) || [i, node];
    host.replaceChildren(...(group ? aboutGroup(group) : about ? aboutNode(at, about) : aboutPass(i)));
    host.dataset.node = about ? about.name : "";
    host.scrollTop = 0;
  };
  return { show };
}

/** The top of the panel, with the button that closes it. */
const heading = (title, name, ...chips) => {
  const close = { "aria-label": "Close", title: "Close (Esc)", onclick: () => go({ node: "", rw: "" }) };
  return el("header", el("h2", title), ...chips, el("p.nodename", name), el("button.close", close, "×"));
};

/** A heading with what is below it; nothing where that is empty. */
function section(title, ...parts) {
  const kept = parts.flat().filter(Boolean);
  return kept.length ? [el("section", el("h3", title), ...kept)] : [];
}

/** Facts by name; those without a value are left out. @param {Record<string, any>} facts */
function factList(facts) {
  const rows = Object.entries(facts).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  if (!rows.length) return null;
  return el("dl", ...rows.flatMap(([name, value]) => [el("dt", name), el("dd", { "data-fact": name }, value)]));
}

const chip = (look, text = look.tag) => {
  const made = el("span.chip", text);
  made.style.background = look.colour;
  made.style.color = look.ink;
  return made;
};

/** A button that chooses a node of the pass that is shown. */
const nodeLink = (name, text = name) =>
  el("button.link", { "data-goto": name, onclick: () => go({ node: name, rw: "" }) }, text);

const listed = (names) => (names.length ? el("ul.names", ...names.map((name) => el("li", nodeLink(name)))) : null);

// ---- a node

function aboutNode(i, node) {
  const graph = graphOf(i);
  const isGone = graph.byName.get(node.name) !== node;
  const here = isGone ? graphOf(i - 1) : graph;
  const look = data.looks[node.kind];
  const rows = rowsOf(node);
  const row = rowOf(node);
  const constants = here.constants.get(node.name) ?? EMPTY;
  return [
    heading(node.label, node.name, chip(look), isGone ? chip(data.changes.removed) : null),
    ...section(
      "",
      factList({
        module: node.path,
        source: node.source,
        shape: node.shape && (node.shape.join(" × ") || "scalar"),
        dtype: node.dtype,
        scale: node.scale,
        "zero point": node.scale ? node.zero_point || "0" : "",
        options: node.options,
        inside: node.precisions.length ? [...counts(node.body)].map(([op, n]) => `${n} ${op}`).join(", ") : node.body.join(" → "),
      }),
    ),
    ...engineLayers(i, node),
    ...whyFloat(node, rows),
    ...quality(node, row, rows),
    ...(node.precisions.length ? EMPTY : charted("Values", "values", "histogram", row, rows)), // a region has those of many ops
    ...(node.precisions.length ? EMPTY : charted("Weights", "weights", "channels", row, rows)),
    ...section("Story", story(i, node, isGone)),
    ...section(
      "Reads",
      listed([...new Set(node.inputs)].filter((name) => here.byName.get(name)?.kind !== "constant")),
      constants.length ? el("ul.constants", ...constants.map(constantRow)) : null,
    ),
    ...section("Read by", listed([...new Set(here.readers.get(node.name) ?? EMPTY)])),
    ...section("Stands for", node.origins.length ? el("p.quiet", node.origins.join(", ")) : null),
    ...section("Call", node.text ? el("code", node.text) : null),
  ];
}

/** A region, opened: the layers that its engine runs, in order, and which of its ops run in float. */
function engineLayers(i, node) {
  const { layers } = node;
  if (!layers.length) return [];
  const total = d3.sum(layers, (layer) => layer.us);
  const made = d3.range(i + 1).find((k) => graphOf(k).byName.has(node.name));
  const inside = graphOf(Math.max(0, made - 1)); // where its ops still stand in the graph
  const show = ([name]) => inside.byName.has(name) && (() => go({ pass: passId(inside.index), mode: "graph", node: name, rw: "" }));
  const listed = layers.map(({ nodes, op, dtype, kind, us }) => ({
    name: nodes.join(" + ") || op, tag: nodes.length ? `${op} · ${dtype}` : dtype, value: us, text: duration(us), colour: kindColour(kind), onclick: show(nodes) }));
  const told = `${layers.length} layers of the engine in ${duration(total)}, as they ran when the model was made:`;
  return section("Inside", el("p", told), shareBar(layers, total), bars(listed, "layers of the engine"));
}

function whyFloat(node, rows) {
  const told = rows.filter((row) => row.precision === "float");
  const reason = node.reason || told.find((row) => row.reason)?.reason;
  const fix = told.find((row) => row.fix)?.fix ?? rows.find((row) => row.fix)?.fix ?? "";
  const isTold = reason && (node.kind === "float" || node.reason);
  if (node.layers.length && node.kind !== "float") return section("In float", told.length && inFloatOf(told));
  return section(
    node.kind === "float" ? "Why float" : "Note",
    isTold && el("p.warn", { "data-fact": "reason" }, reason),
    isTold && fix && el("div.fixline", { "data-fact": "fix" }, copyable(fix)),
    node.note && el("p", { "data-fact": "note" }, node.note),
  );
}

/** Ops of a region that run in float, by their reasons. */
function inFloatOf(rows) {
  const ops = (found) => found.map((row) => `${row.path || row.name} (${row.op})`).join(", ");
  const fixes = (found) => [...new Set(found.map((row) => row.fix))].filter(Boolean).map((fix) => el("div.fixline", copyable(fix)));
  return el("ul.names", ...d3.groups(rows, (row) => row.reason).map(([why, found]) => el("li", el("p.warn", why), el("p.quiet", ops(found)), ...fixes(found))));
}

const decibelsOf = (value) => (value === null || value === undefined ? null : withUnit(value));
const micros = (value) => (typeof value === "number" ? duration(value) : null);

function quality(node, row, rows) {
  const macs = d3.sum(rows, (r) => r.macs);
  const timed = (data.time?.ops ?? []).find((op) => op.name === node.name && !node.layers.length);
  const price = (field) => (rows.some((r) => typeof r[field] === "number") ? d3.sum(rows, (r) => r[field]) : null);
  return section(
    "Quality and cost",
    factList({
      SQNR: row && decibelsOf(row.sqnr),
      "own SQNR": row && decibelsOf(row.own_sqnr),
      measured: timed && micros(timed.us),
      "in float": micros(price("float_us")),
      "on integers": micros(price("int8_us")),
      MACs: macs ? counted(macs) : null,
    }),
  );
}

/** A chart of `charts.js`, where there is data for it. */
function charted(title, source, chart, row, rows) {
  const found = [row, ...rows].find((r) => r && data[source]?.[r.name]);
  if (!found) return [];
  const host = el("div.chart", { "data-chart": source });
  requestAnimationFrame(() => host.isConnected && charts[chart](host, data[source][found.name])); // it must have a width
  return section(title, host);
}

const constantRow = (c) => el("li", el("b", lastPart(c.label)), ` ${c.shape?.join("×") || "scalar"} · ${c.dtype}`, c.scale ? el("span.quiet", ` scale ${c.scale}`) : null);

/** For each pass, the rewrites by the names of what they made. */
const rewritesMaking = memo((i) => {
  const made = new Map();
  for (const [number, rewrite] of passes[i].rewrites.entries()) for (const name of namesOf(i, rewrite).after) made.set(name, number); // the last one: the others were on the way
  return made;
});

/** What every pass did to a node, the latest first: the rule, from which nodes; click to see it. */
function story(i, node, isGone) {
  const steps = [];
  for (let k = isGone ? i - 1 : i; k >= 0; k--) {
    const now = graphOf(k).byName.get(node.name);
    const old = k > 0 ? graphOf(k - 1).byName.get(node.name) : undefined;
    if (!now || now === old) continue;
    const number = rewritesMaking(k).get(node.name);
    const rewrite = number === undefined ? null : passes[k].rewrites[number];
    steps.push(
      el(
        "li",
        el("button.link", { onclick: () => go({ pass: passId(k), mode: "diff", node: node.name, rw: "" }) }, passes[k].name),
        rewrite ? el("span", ` ${rewrite.rule}`) : null,
        rewrite ? el("span.source", ` ${rewrite.source}`) : null,
        el("span.what", old ? diffOf(k).told.get(node.name)?.join("; ") || "described anew" : k ? madeFrom(k, node, rewrite) : "traced"),
      ),
    );
  }
  return steps.length ? el("ol.story", ...steps) : null;
}

/** From which nodes of the graph before it was made. */
function madeFrom(k, node, rewrite) {
  const before = graphOf(k - 1);
  const named = rewrite ? inOrder(k - 1, rewrite.before).filter((name) => before.byName.has(name)) : [];
  const byOrigin = before.drawn
    .filter((old) => !graphOf(k).byName.has(old.name) && old.origins.some((o) => node.origins.includes(o)))
    .map((old) => old.name);
  const from = named.length > 1 || !byOrigin.length ? named : byOrigin;
  return from.length ? `made from ${from.join(", ")}` : "added";
}

// ---- a group, a pass

function aboutGroup(group) {
  const names = [];
  const collect = (g) => {
    for (const child of g.children) isGroupOf(child) ? collect(child) : names.push(child.node);
  };
  collect(group);
  const slow = names.filter((node) => node.kind === "float");
  return [
    heading(group.title, group.path),
    ...section("", factList({ nodes: String(group.count), changed: marksOf(group.marks) }), countTable(data.looks, group.kinds)),
    ...section("In float", slow.length && el("ul.names", ...slow.slice(0, 40).map(inFloat))),
    ...section(
      "Nodes",
      listed(names.slice(0, 200).map((node) => node.name)),
      names.length > 200 ? el("p.quiet", `and ${names.length - 200} more`) : null,
    ),
  ];
}

const inFloat = (node) => el("li", nodeLink(node.name), " ", el("span.quiet", node.reason));

/** How many there are of each, with its chip and meaning. @param {Record<string, any>} looks @param {Map<string, number>} counts */
function countTable(looks, counts) {
  const row = ([name, look]) => el("tr", el("td", chip(look)), el("td", look.meaning), el("td.number", String(counts.get(name))));
  return el("table.kindtable", ...Object.entries(looks).filter(([name]) => counts.get(name)).map(row));
}

function aboutPass(i) {
  const pass = passes[i];
  const diff = diffOf(i);
  const nodes = graphOf(i).drawn;
  return [
    el("header", el("h2", pass.name), el("p.nodename", pass.stage ? `stage: ${pass.stage}` : "")),
    ...section(
      "",
      factList({
        nodes: String(nodes.length),
        edits: isPair ? null : String(pass.rewrites.length),
        took: isPair ? null : duration(1000 * pass.ms),
        SQNR: decibelsOf(pass.sqnr),
      }),
    ),
    ...section("Nodes", countTable(data.looks, kindsOf(nodes))),
    ...section(
      isPair ? "Against the graph before" : "Against the pass before",
      diff &&
        (Object.values(diff.counts).some(Boolean)
          ? countTable(data.changes, new Map(Object.entries(diff.counts)))
          : el("p.quiet", "No difference.")),
    ),
    el("p.quiet.hint", "Click a node to see all about it. Press ? for the keys."),
  ];
}
