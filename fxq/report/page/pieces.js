/* The layout of one piece of a group, by dagre. Pieces that are alike are laid out once. */

const pieces = new Map();

/** What `make` gives, made once for pieces of the same content: no name is part of it. */
function alike(kind, widths, heights, edges, port, make) {
  const key = `${kind}|${widths}|${heights}|${edges.join(";")}|${port}`;
  let flow = pieces.get(key);
  if (!flow) pieces.set(key, (flow = make(widths, heights, edges, port)));
  return flow;
}

/** The layout of one piece, its boxes in an order in which each stands behind what it reads, unless it has a cycle.
 * `port`: of each box, 1 for a value that enters, 2 for one that leaves, else 0. */
function pieceFlow(widths, heights, edges, port, isAcyclic) {
  if (isAcyclic && isSimple(widths.length, edges)) return alike("simple", widths, heights, edges, port, simpleFlow);
  if (isAcyclic && slicing(widths.length, edges)) return alike("sliced", widths, heights, edges, port, slicedFlow);
  return alike("dagre", widths, heights, edges, port, dagreFlow);
}

/** Whether all that is between the first and the last box only feeds the last one: a layer and its weights. */
const isSimple = (count, edges) => count === 2 || (edges.length === count - 1 && edges.every(([, b]) => b === count - 1));

/** The first box above the last one, and what else the last one reads to the right of the first. */
function simpleFlow(widths, heights, edges) {
  const last = widths.length - 1;
  const y = Math.max(...heights.slice(0, last)) + GAP.rank;
  const x = [-widths[0] / 2];
  for (let i = 1; i < last; i++) x.push(x[i - 1] + widths[i - 1] + GAP.node);
  x.push(-widths[last] / 2);
  const tops = [...heights.slice(0, last).fill(0), y];
  const bottoms = rankBottoms(tops, heights);
  const routes = edges.map(([a, b]) => (a === 0 ? [0, heights[0], 0, y] : attached([], a, b, x, tops, widths, heights, bottoms)));
  return { x, y: tops, routes, width: 0, height: 0 };
}

function dagreFlow(widths, heights, edges, port) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: GAP.node, edgesep: GAP.edge, ranksep: GAP.rank, rankalign: "top" });
  for (const [i, width] of widths.entries()) graph.setNode(i, { width, height: heights[i] });
  for (const [a, b] of edges) graph.setEdge(a, b, { weight: 2, labeloffset: 0 });
  holdInPlace(graph, widths.length, edges, port);
  dagre.layout(graph);
  const x = [];
  const y = [];
  for (const [i, width] of widths.entries()) {
    const { x: cx, y: cy } = graph.node(i);
    x.push(cx - width / 2);
    y.push(cy - heights[i] / 2);
  }
  const bottoms = rankBottoms(y, heights);
  const routes = edges.map(([a, b]) => {
    const points = graph
      .edge(a, b)
      .points.slice(1, -1)
      .flatMap((p) => besideBoxes(p, bottoms));
    return attached(points, a, b, x, y, widths, heights, bottoms);
  });
  return { x, y, routes, width: 0, height: 0 };
}

/** For each row of boxes, by the y of its top: where its tallest box ends. */
function rankBottoms(y, heights) {
  const bottoms = new Map();
  for (const [i, top] of y.entries()) {
    const row = Math.round(top);
    bottoms.set(row, Math.max(bottoms.get(row) ?? -Infinity, top + heights[i]));
  }
  return bottoms;
}

/** A point of an edge; one that passes a row of boxes goes straight down until the row ends. */
function besideBoxes({ x, y }, bottoms) {
  const bottom = bottoms.get(Math.round(y));
  return bottom === undefined || bottom - y < 1 ? [x, y] : [x, y, x, bottom];
}

/** Invisible edges that keep the first box on top, values that enter above all, what leaves and the last box below. */
function holdInPlace(graph, count, edges, port) {
  const reads = new Set(edges.map(([, b]) => b));
  const isRead = new Set(edges.map(([a]) => a));
  const enters = port.some((p) => p === 1);
  const leaves = port.some((p) => p === 2);
  graph.setNode("top", { width: 0, height: 0 });
  if (leaves) graph.setNode("bottom", { width: 0, height: 0 });
  for (let i = 0; i < count; i++) {
    const isTop = enters ? port[i] === 1 : i === 0;
    if (isTop) graph.setEdge("top", i, { weight: 50, labeloffset: 0 });
    else if (!reads.has(i)) graph.setEdge("top", i, { weight: 0, minlen: enters ? 2 : 1, labeloffset: 0 });
    if (leaves && port[i] === 2) graph.setEdge(i, "bottom", { weight: 50, labeloffset: 0 });
    else if (leaves && !isRead.has(i)) graph.setEdge(i, "bottom", { weight: 0, minlen: 2, labeloffset: 0 });
    else if (!leaves && !isRead.has(i) && i !== count - 1) graph.setEdge(i, count - 1, { weight: 0, labeloffset: 0 });
  }
}

/** The points of an edge with its ends on the lower side of one box and the upper side of the other. */
function attached(points, a, b, x, y, widths, heights, bottoms) {
  const into = (i, wanted) => {
    const margin = Math.min(14, widths[i] / 2);
    return Math.max(x[i] + margin, Math.min(x[i] + widths[i] - margin, wanted));
  };
  const upwards = y[b] < y[a]; // only where there is a cycle
  const start = points.length ? points[0] : x[b] + widths[b] / 2;
  const end = points.length ? points.at(-2) : x[a] + widths[a] / 2;
  if (upwards) return [into(a, start), y[a], ...points, into(b, end), y[b] + heights[b]];
  const below = besideBoxes({ x: into(a, start), y: y[a] }, bottoms).slice(2); // past higher boxes in its row
  return [into(a, start), y[a] + heights[a], ...below, ...points, into(b, end), y[b]];
}
