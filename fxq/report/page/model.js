/* The passes as graphs: who reads whom, and which constants are a line in their reader.

   Everything is made when it is first asked for, and kept. */

/** A node as `fxq/graph/view.py` describes it, fields at their default filled in; `lines` is what stands in its box, each
 * a role and a text.
 * @typedef {{name: string, kind: string, label: string, body: string[], options: string, inputs: string[],
 *   text: string, path: string, source: string, made_by: string, shape: number[]|null, dtype: string, scale: string,
 *   zero_point: string, reason: string, note: string, origins: string[], lines: [string, string][],
 *   precisions: string[], layers: {nodes: string[], op: string, dtype: string, kind: string, us: number}[]}} NodeRecord */

/** @type {any} */
const EMPTY = Object.freeze([]);

for (const node of data.nodes) {
  node.label ||= node.name;
  if (!(node.kind in data.looks)) node.kind = "op";
  for (const field of ["inputs", "body", "origins", "lines", "precisions"]) node[field] ??= EMPTY;
  for (const field of ["options", "text", "path", "source", "made_by", "dtype", "scale", "zero_point", "reason", "note"])
    node[field] ??= "";
  node.shape ??= null;
  node.layers = (node.layers ?? EMPTY).map(([nodes, op, dtype, kind, us]) => ({ nodes, op, dtype, kind, us }));
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

const passes = data.passes;

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
      put(readers, name, node.name);
      if (input.kind !== "constant") continue;
      read.add(name);
      put(constants, node.name, input);
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

// ---- what else is known of a node

const rowsByName = new Map((data.ledger?.rows ?? []).map((row) => [row.name, row]));
const rowsByInto = d3.group(data.ledger?.rows ?? [], (row) => row.into);

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
const kindsOf = (nodes) => counts(nodes.map((node) => node.kind));

const lastPart = (path) => path.slice(path.lastIndexOf(".") + 1);

/** The nodes that a name stands for in a graph: itself, or who reads it where it is a constant that is not drawn. */
function drawnNames(graph, name) {
  const node = graph.byName.get(name);
  if (!node) return EMPTY;
  return node.kind === "constant" && graph.readers.has(name) ? graph.readers.get(name) : [name];
}
