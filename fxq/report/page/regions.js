/* A region, opened: the graph that it was made of, with what its engine took for each layer. */

/** What a region was made of. `at`: the pass behind which these nodes stand in the graph. `ends`: those that others read.
 * @typedef {{at: number, nodes: NodeRecord[], ends: string[]}} Inside */

/** What the regions in the graph after pass `i` were made of, by their names. @type {(i: number) => Map<string, Inside>} */
const insidesIn = memo((i) => {
  const found = new Map();
  if (isPair) return found;
  for (const node of graphOf(i).drawn) {
    const inside = node.precisions.length ? insideOf(i, node) : null;
    if (inside) found.set(node.name, inside);
  }
  return found;
});

/** The nodes before pass `k` by the first that they became. @type {(k: number) => Map<string, Set<string>>} */
const heirsIn = memo((k) => {
  const found = new Map();
  for (const [name, [heir]] of diffOf(k).became) {
    if (!found.has(heir)) found.set(heir, new Set());
    found.get(heir).add(name);
  }
  return found;
});
const EMPTY_SET = new Set();

/** @param {NodeRecord} region @returns {Inside|null} */
function insideOf(i, region) {
  const made = d3.range(1, i + 1).find((k) => graphOf(k).byName.has(region.name));
  const diff = made && !graphOf(0).byName.has(region.name) ? diffOf(made) : null;
  if (!diff) return null;
  const { before } = diff;
  const names = heirsIn(made).get(region.name) ?? EMPTY_SET;
  if (!names.size || [...names].some((name) => graphOf(i).byName.has(name))) return null;
  const nodes = before.drawn.filter((node) => names.has(node.name));
  const isEnd = ({ name }) => (before.readers.get(name) ?? EMPTY).some((reader) => !names.has(reader));
  const layers = layersByNode(region);
  return { at: made - 1, nodes: nodes.map((node) => timed(node, layers)), ends: nodes.filter(isEnd).map((node) => node.name) };
}

/** The layers of a region by the names of the nodes in them. @param {NodeRecord} region */
function layersByNode(region) {
  const found = new Map();
  for (const layer of region.layers)
    for (const name of layer.nodes) found.set(name, [...(found.get(name) ?? []), layer]);
  return found;
}

/** A node with the layers that it is the first op of, or is in, as lines in its box.
 * @param {NodeRecord} node @param {Map<string, object[]>} byName */
function timed(node, byName) {
  const layers = byName.get(node.name) ?? [];
  const own = layers.filter(({ nodes }) => nodes[0] === node.name);
  const texts = own.length
    ? own.map(({ op, dtype, us }) => `${duration(us)}  ${op}  ${dtype}`)
    : layers.map(({ nodes }) => `in the layer of ${nodes[0]}`);
  return texts.length ? { ...node, lines: [...node.lines, ...texts.map((text) => ["scale", clip(text)])] } : node;
}

/** Where a node stands that is inside of a region after pass `i`: `[pass, node]`; null where there is none. */
function foundInside(i, name) {
  for (const { at, nodes } of insidesIn(i).values())
    if (nodes.some((node) => node.name === name)) return [at, graphOf(at).byName.get(name)];
  return null;
}

/** The head of the frame around an open region. @param {NodeRecord} region */
const regionTitle = ({ label, name, layers }) =>
  layers.length ? `${label}  ${name}: ${layers.length} layers, ${duration(d3.sum(layers, (layer) => layer.us))}` : `${label}  ${name}`;
