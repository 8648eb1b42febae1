/* Where things are inside one group, by dagre.

   A group is laid out by itself. Its children are boxes of known size; a value that enters or leaves is a port, a box
   without size at the top or the bottom, so that edges run around boxes. */

const GAP = { rank: 40, node: 26, edge: 14 };
const MOST_LINES = 4; // of one value, side by side: what more boxes read is one line with branches

/** What is laid out: `widths`, `heights` of the boxes, in-ports first, then children, then out-ports; edges as pairs.
 * @typedef {{ins: number, outs: number, widths: number[], heights: number[], edges: [number, number][]}} Parts
 * `x`, `y`: top left of each box; `routes`: of each edge, its points [x, y, x, y, …] from top to bottom.
 * @typedef {{x: number[], y: number[], routes: number[][], width: number, height: number}} Flow */

/** @param {Parts} parts @returns {Flow} */
function layoutFlow(parts) {
  const { widths, heights, edges } = parts;
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: GAP.node, edgesep: GAP.edge, ranksep: GAP.rank, rankalign: "top" });
  for (const [i, width] of widths.entries()) graph.setNode(i, { width, height: heights[i] });
  const ways = waysOf(graph, edges);
  holdPorts(graph, parts);
  dagre.layout(graph);
  const x = widths.map((width, i) => graph.node(i).x - width / 2);
  const y = heights.map((height, i) => graph.node(i).y - height / 2);
  const bottoms = d3.rollup(y.keys(), (row) => d3.max(row, (i) => y[i] + heights[i]), (i) => Math.round(y[i]));
  const routes = ways.map((way) => {
    const steps = d3.pairs(way, (from, to) => [...graph.edge(from, to).points.slice(1, -1), graph.node(to)]).flat();
    const points = steps.slice(0, -1).flatMap((point) => pastBoxes(point, bottoms));
    return attached(points, way[0], way.at(-1), { x, y, widths, heights }, bottoms);
  });
  return shifted(parts, { x, y, routes, width: 0, height: 0 });
}

/** Give the graph its edges; for each, the nodes on its way. A value with many readers has a node where each branches off. */
function waysOf(graph, edges) {
  const link = (from, to, weight) => graph.setEdge(from, to, { weight, labeloffset: 0 });
  const ways = [];
  for (const [tail, numbers] of d3.group(edges.keys(), (number) => edges[number][0])) {
    let way = [tail];
    for (const [k, number] of d3.sort(numbers, (n) => edges[n][1]).entries()) {
      if (numbers.length > MOST_LINES && k > 0 && k < numbers.length - 1) {
        const branch = `${tail} ${k}`;
        graph.setNode(branch, { width: 0, height: 0 });
        link(way.at(-1), branch, 1);
        way = [...way, branch];
      }
      link(way.at(-1), edges[number][1], 2);
      ways[number] = [...way, edges[number][1]];
    }
  }
  return ways;
}

/** Invisible edges that keep values that enter above all, and what leaves and what nobody reads below. */
function holdPorts(graph, { ins, outs, widths, edges }) {
  const hold = (from, to, weight, minlen = 1) => graph.setEdge(from, to, { weight, minlen, labeloffset: 0 });
  const count = widths.length;
  const isRead = new Set(edges.map(([a]) => a));
  const last = outs ? "bottom" : count - 1;
  if (outs) graph.setNode("bottom", { width: 0, height: 0 });
  for (let i = count - outs; i < count; i++) hold(i, "bottom", 50);
  for (let i = ins; i < count - outs; i++) if (!isRead.has(i) && i !== last) hold(i, last, 0, outs ? 2 : 1);
  if (!ins) return;
  graph.setNode("top", { width: 0, height: 0 });
  for (let i = 0; i < ins; i++) hold("top", i, 50);
  for (const i of besidePorts(ins, edges)) hold("top", i, 0, 2);
}

/** The boxes that read nothing and would stand as high as the ports, next to what is read with these. */
function besidePorts(ins, edges) {
  const rows = new Map(d3.range(ins).map((i) => [i, 0])); // below the ports, at least
  for (const [a, b] of d3.sort(edges, ([a]) => a)) if (rows.has(a)) rows.set(b, Math.max(rows.get(b) ?? 0, rows.get(a) + 1));
  const free = new Map();
  for (const [a, b] of d3.sort(edges, ([a]) => -a))
    if (!rows.has(a)) free.set(a, Math.min(free.get(a) ?? Infinity, (rows.get(b) ?? free.get(b) ?? Infinity) - 1));
  const reads = new Set(edges.map(([, b]) => b));
  return [...free].filter(([i, row]) => row < 1 && !reads.has(i)).map(([i]) => i);
}

/** A point of an edge; one that passes a row of boxes goes straight down until the row ends. */
function pastBoxes({ x, y }, bottoms) {
  const bottom = bottoms.get(Math.round(y));
  return bottom === undefined || bottom - y < 1 ? [x, y] : [x, y, x, bottom];
}

/** The points of an edge with its ends on the lower side of one box and the upper side of the other. */
function attached(points, a, b, { x, y, widths, heights }, bottoms) {
  const into = (i, wanted) => {
    const margin = Math.min(14, widths[i] / 2);
    return Math.max(x[i] + margin, Math.min(x[i] + widths[i] - margin, wanted));
  };
  const start = into(a, points.length ? points[0] : x[b] + widths[b] / 2);
  const end = into(b, points.length ? points.at(-2) : x[a] + widths[a] / 2);
  if (y[b] < y[a]) return [start, y[a], ...points, end, y[b] + heights[b]]; // only where there is a cycle
  const below = pastBoxes({ x: start, y: y[a] }, bottoms).slice(2); // past higher boxes in its row
  return [start, y[a] + heights[a], ...below, ...points, end, y[b]];
}

/** The flow with its top left corner at 0, 0, and its size. */
function shifted({ widths, heights, ins, outs }, flow) {
  const across = flow.routes.flatMap((route) => route.filter((_, at) => at % 2 === 0));
  const left = d3.min([...flow.x, ...across]);
  const right = d3.max([...flow.x.map((v, i) => v + widths[i]), ...across]);
  const top = d3.min(flow.y) + (ins ? GAP.rank / 2 : 0); // edges of ports would begin a whole gap away from the frame
  const bottom = d3.max(flow.y, (v, i) => v + heights[i]) - (outs ? GAP.rank / 2 : 0);
  const within = (v) => Math.max(0, Math.min(bottom - top, v - top));
  const routes = flow.routes.map((route) => route.map((v, at) => (at % 2 ? within(v) : v - left)));
  return { x: flow.x.map((v) => v - left), y: flow.y.map((v) => v - top), routes, width: right - left, height: bottom - top };
}
