/* The passes as graphs: who reads whom, which constants are a line in their reader, and what differs from pass to pass.

   Everything is made when it is first asked for, and kept. */

/** A node as `fxq/view.py` describes it, fields at their default filled in; `id` is its place in `data.nodes`.
 * @typedef {{id: number, name: string, kind: string, label: string, body: string[], options: string, inputs: string[],
 *   text: string, path: string, source: string, made_by: string, shape: number[]|null, dtype: string, scale: string,
 *   zero_point: string, reason: string, note: string, origins: string[]}} NodeRecord */

const EMPTY = Object.freeze([]);

for (const [id, node] of (data.nodes ?? []).entries()) {
  node.id = id;
  node.label ||= node.name;
  if (!(node.kind in data.looks)) node.kind = "op";
  for (const field of ["inputs", "body", "origins"]) node[field] ??= EMPTY;
  for (const field of ["options", "text", "path", "source", "made_by", "dtype", "scale", "zero_point", "reason", "note"])
    node[field] ??= "";
  node.shape ??= null;
}

/** The graph after one pass.
 * @typedef {{index: number, name: string, nodes: NodeRecord[], byName: Map<string, NodeRecord>,
 *   constants: Map<string, NodeRecord[]>, drawn: NodeRecord[], readers: Map<string, string[]>}} Graph */

/** `make(key)`, made once for each key; of large things, only the latest `most` are kept. */
function memo(make, most = Infinity) {
  const made = new Map();
  return (key) => {
    if (!made.has(key)) {
      made.set(key, make(key));
      if (made.size > most) made.delete(made.keys().next().value);
    }
    return made.get(key);
  };
}

const passes = data.passes ?? [];

/** The graph after pass `i`. @type {(i: number) => Graph} */
const graphOf = memo((i) => {
  const nodes = passes[i].nodes.map((id) => data.nodes[id]);
  const byName = new Map(nodes.map((node) => [node.name, node]));
  const constants = new Map();
  const readers = new Map();
  const read = new Set();
  for (const node of nodes) {
    for (const name of node.inputs.length > 1 ? new Set(node.inputs) : node.inputs) {
      const input = byName.get(name);
      if (!input) continue;
      if (readers.has(name)) readers.get(name).push(node.name);
      else readers.set(name, [node.name]);
      if (input.kind !== "constant") continue;
      read.add(name);
      if (constants.has(node.name)) constants.get(node.name).push(input);
      else constants.set(node.name, [input]);
    }
  }
  const drawn = nodes.filter((node) => !read.has(node.name));
  return { index: i, name: passes[i].name, nodes, byName, constants, drawn, readers };
});

/** The name of a pass in the hash: with its number where two have the same name. */
const passId = memo((i) => {
  const same = passes.slice(0, i).filter((pass) => pass.name === passes[i].name).length;
  return same ? `${passes[i].name}.${same + 1}` : passes[i].name;
});

/** Number of the chosen pass: the last one when none is chosen. */
function chosenPass() {
  const found = passes.findIndex((_, i) => passId(i) === state.pass);
  return found < 0 ? passes.length - 1 : found;
}

// ---- what differs

const FIELDS = ["kind", "label", "body", "options", "shape", "dtype", "scale", "zero_point"];
const SPOKEN = { label: "op", zero_point: "zero point" };

const same = (a, b) => a === b || (Array.isArray(a) && Array.isArray(b) && a.length === b.length && a.every((v, k) => v === b[k]));

/** A field's value as text. */
function spoken(value) {
  if (Array.isArray(value)) return value.join(typeof value[0] === "number" ? "×" : "; ") || "none";
  return value === "" || value === null || value === undefined ? "none" : String(value);
}

/** What pass `i` changed, both graphs in one. `order`: the drawn nodes of both, removed ones before what they became.
 * `mark`: added, removed, changed or rewired, by name. `told`: what changed, as text. `became`: removed → its heirs.
 * @typedef {{before: Graph, after: Graph, order: NodeRecord[], mark: Map<string, string>, told: Map<string, string[]>,
 *   became: Map<string, string[]>, counts: Record<string, number>}} Diff */

/** @type {(i: number) => Diff|null} */
const diffOf = memo((i) => {
  if (i < 1) return null;
  const before = graphOf(i - 1);
  const after = graphOf(i);
  const mark = new Map();
  const told = new Map();
  const fields = new Map(); // of every node that changed, constants too
  for (const node of after.nodes) {
    const old = before.byName.get(node.name);
    if (old === undefined) mark.set(node.name, "added");
    else if (old !== node) compareNodes(old, node, mark, told, fields);
  }
  for (const node of before.nodes) if (!after.byName.has(node.name)) mark.set(node.name, "removed");
  for (const [reader, constants] of after.constants) {
    const changed = constants.filter((constant) => fields.has(constant.name));
    if (!changed.length) continue;
    if (!mark.has(reader) || mark.get(reader) === "rewired") mark.set(reader, "changed");
    const texts = changed.flatMap((c) =>
      fields
        .get(c.name)
        .filter((f) => f.field === "shape" || f.field === "dtype")
        .map((f) => `${lastPart(c.label)} ${f.text}`),
    );
    told.set(reader, [...(told.get(reader) ?? []), ...texts]);
  }
  const became = heirs(before, after, mark, fields);
  const order = unionOrder(before, after, became);
  const counts = { added: 0, removed: 0, changed: 0, rewired: 0 };
  for (const node of order) if (mark.has(node.name)) counts[mark.get(node.name)]++;
  return { before, after, order, mark, told, became, counts };
});

function compareNodes(old, node, mark, told, fields) {
  const texts = [];
  for (const field of FIELDS) {
    if (same(old[field], node[field])) continue;
    texts.push({ field, text: `${SPOKEN[field] ?? field} ${spoken(old[field])} → ${spoken(node[field])}` });
  }
  const rewired = !same(old.inputs, node.inputs);
  if (texts.length) {
    mark.set(node.name, "changed");
    fields.set(node.name, texts);
  } else if (rewired) mark.set(node.name, "rewired");
  const lines = texts.filter((t) => t.field !== "body").map((t) => t.text); // the body stands in the box anyway
  if (rewired) {
    const gone = old.inputs.filter((name) => !node.inputs.includes(name));
    const come = node.inputs.filter((name) => !old.inputs.includes(name));
    lines.push(`reads ${gone.join(", ") || "–"} → ${come.join(", ") || "–"}`);
  }
  if (lines.length) told.set(node.name, lines);
}

const originsOf = (node) => (node.origins.length ? node.origins : [node.name]);

/** For each removed node, the added or changed nodes that stand for the same traced ops. */
function heirs(before, after, mark, fields) {
  const byOrigin = new Map();
  for (const node of after.drawn) {
    if (mark.get(node.name) !== "added" && !fields.has(node.name)) continue;
    for (const origin of originsOf(node)) {
      if (byOrigin.has(origin)) byOrigin.get(origin).push(node.name);
      else byOrigin.set(origin, [node.name]);
    }
  }
  const became = new Map();
  for (const node of before.drawn) {
    if (mark.get(node.name) !== "removed") continue;
    const found = new Set(originsOf(node).flatMap((origin) => byOrigin.get(origin) ?? []));
    if (found.size) became.set(node.name, [...found]);
  }
  return became;
}

/** The drawn nodes of both graphs: removed ones just before what they became, else behind what stood before them. */
function unionOrder(before, after, became) {
  const ahead = new Map();
  const behind = new Map();
  const put = (map, key, node) => (map.has(key) ? map.get(key).push(node) : map.set(key, [node]));
  let anchor = "";
  for (const node of before.drawn) {
    if (after.byName.has(node.name)) anchor = node.name;
    else if (became.has(node.name)) put(ahead, became.get(node.name)[0], node);
    else put(behind, anchor, node);
  }
  const order = [...(behind.get("") ?? [])];
  for (const node of after.drawn) order.push(...(ahead.get(node.name) ?? []), node, ...(behind.get(node.name) ?? []));
  return order;
}

// ---- what else is known of a node

const rowsByName = new Map((data.ledger?.rows ?? []).map((row) => [row.name, row]));
const rowsByInto = new Map();
for (const row of data.ledger?.rows ?? []) {
  if (!row.into) continue;
  if (rowsByInto.has(row.into)) rowsByInto.get(row.into).push(row);
  else rowsByInto.set(row.into, [row]);
}

/** The rows of the ledger that a node stands for, in execution order. @param {NodeRecord} node */
function rowsOf(node) {
  const into = rowsByInto.get(node.name);
  if (into) return into;
  if (rowsByName.has(node.name)) return [rowsByName.get(node.name)];
  return node.origins.map((name) => rowsByName.get(name)).filter((row) => row !== undefined);
}

/** The row that speaks for a node: the last one that has an SQNR, else the last one. */
function rowOf(node) {
  const rows = rowsOf(node);
  return rows.findLast((row) => row.sqnr !== null && row.sqnr !== undefined) ?? rows.at(-1) ?? null;
}

/** How many nodes there are of each kind. @param {NodeRecord[]} nodes */
function kindsOf(nodes) {
  const kinds = new Map();
  for (const { kind } of nodes) kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  return kinds;
}

const lastPart = (path) => path.slice(path.lastIndexOf(".") + 1);

/** The nodes that a name stands for in a graph: itself, or who reads it where it is a constant that is not drawn. */
function drawnNames(graph, name) {
  const node = graph.byName.get(name);
  if (!node) return EMPTY;
  return node.kind === "constant" && graph.readers.has(name) ? graph.readers.get(name) : [name];
}
