/* Where things are inside one group: dagre lays out its parts, we stack them.

   A group is laid out by itself. Its children are boxes of known size; a value that enters or leaves is a port, a box
   without size at the top or the bottom, so that edges run around boxes. A network is mostly a chain: where all that
   lives is one value, the graph is cut, and dagre is called for the piece between two cuts. Pieces that are alike (the
   blocks of a network) are laid out once: results are kept by content, and do not name nodes. */

const GAP = { rank: 40, node: 26, edge: 14 };

/** What is laid out: `widths`, `heights` of the boxes, in-ports first, then children, then out-ports; edges as pairs.
 * @typedef {{ins: number, outs: number, widths: number[], heights: number[], edges: [number, number][]}} Parts
 * `x`, `y`: top left of each box; `routes`: of each edge, its points [x, y, x, y, …] from top to bottom.
 * @typedef {{x: number[], y: number[], routes: number[][], width: number, height: number}} Flow */

/** @param {Parts} parts @returns {Flow} */
function layoutFlow(parts) {
  const { widths, heights, edges } = parts;
  const { order, reading } = topological(parts);
  const x = new Array(widths.length).fill(0);
  const y = new Array(widths.length).fill(0);
  const routes = new Array(edges.length);
  const sequence = order ?? widths.map((_, k) => k);
  const cuts = order ? cutsOf(order, reading) : [0, widths.length - 1];
  const inside = edgesBetween(sequence, cuts, edges);
  for (let k = 0; k < cuts.length - 1; k++)
    placePiece(parts, sequence.slice(cuts[k], cuts[k + 1] + 1), inside[k], k === 0, x, y, routes, order !== null);
  return shifted(parts, { x, y, routes, width: 0, height: 0 });
}

/** The boxes in an order in which each stands behind what it reads, and late: a source next to who reads it.
 * `reading[i]`: the edges that leave box i, by number. No order where there is a cycle. */
function topological({ ins, widths, edges }) {
  const inputs = widths.map(() => []);
  const reading = widths.map(() => []);
  for (const [number, [a, b]] of edges.entries()) {
    inputs[b].push(a);
    reading[a].push({ to: b, number });
  }
  const order = [];
  const seen = new Uint8Array(widths.length); // 1: on the way, 2: done
  const visit = (i) => {
    if (seen[i] === 2) return true;
    if (seen[i] === 1) return false;
    seen[i] = 1;
    for (const input of inputs[i]) if (!visit(input)) return false;
    seen[i] = 2;
    order.push(i);
    return true;
  };
  for (let i = 0; i < widths.length; i++) {
    const waits = i >= ins && !inputs[i].length && reading[i].length; // its reader takes it along
    if (!waits && !visit(i)) return { order: null, reading };
  }
  return { order, reading };
}

/** Places in the order past which only values of the box at that place live: there the graph can be cut. */
function cutsOf(order, reading) {
  const place = new Int32Array(order.length);
  for (const [k, i] of order.entries()) place[i] = k;
  const cuts = [];
  let reach = -1;
  for (const [k, i] of order.entries()) {
    if (reach <= k) cuts.push(k);
    for (const { to } of reading[i]) reach = Math.max(reach, place[to]);
  }
  return cuts;
}

/** For each two cuts, the edges between them, by number. */
function edgesBetween(sequence, cuts, edges) {
  const piece = new Int32Array(sequence.length); // that a box is in the first part of
  for (let k = 0; k < cuts.length - 1; k++) for (let at = cuts[k]; at < cuts[k + 1]; at++) piece[sequence[at]] = k;
  piece[sequence.at(-1)] = cuts.length - 2;
  const inside = cuts.map(() => []);
  for (const [number, [a]] of edges.entries()) inside[piece[a]].push(number);
  return inside;
}

/** Lay out the boxes of one piece below its first box, which has its place already, unless it is the first piece. */
function placePiece(parts, members, numbers, isFirst, x, y, routes, isAcyclic) {
  const { widths, heights, ins, outs } = parts;
  const index = new Map(members.map((i, k) => [i, k]));
  const edges = numbers.map((number) => parts.edges[number].map((i) => index.get(i)));
  const port = members.map((i) => (i < ins ? 1 : i >= widths.length - outs ? 2 : 0));
  const flow = pieceFlow(
    members.map((i) => widths[i]),
    members.map((i) => heights[i]),
    edges,
    port,
    isAcyclic,
  );
  const top = members[0];
  // Turned around where it would lead even further to one side: pieces that all lean to the right would make a slope.
  const middle = isFirst ? 0 : x[top] + widths[top] / 2;
  const lean = flow.x.at(-1) + widths[members.at(-1)] / 2 - (flow.x[0] + widths[top] / 2);
  const turn = middle * lean > 0 ? -1 : 1;
  const axis = flow.x[0] + widths[top] / 2;
  const dy = isFirst ? 0 : y[top] - flow.y[0];
  for (const [k, i] of members.entries()) {
    x[i] = middle + turn * (flow.x[k] + widths[i] / 2 - axis) - widths[i] / 2;
    y[i] = flow.y[k] + dy;
  }
  for (const [k, number] of numbers.entries())
    routes[number] = flow.routes[k].map((v, at) => (at % 2 ? v + dy : middle + turn * (v - axis)));
}

const pieces = new Map();

/** The layout of one piece, kept by content. `port`: 1 for a value that enters, 2 for one that leaves, else 0. */
function pieceFlow(widths, heights, edges, port, isAcyclic) {
  const key = `${widths}|${heights}|${edges.join(";")}|${port}`;
  let flow = pieces.get(key);
  if (!flow)
    pieces.set(
      key,
      (flow = isAcyclic && isSimple(widths.length, edges) ? simpleFlow(widths, heights, edges) : dagreFlow(widths, heights, edges, port)),
    );
  return flow;
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

/** The flow with its top left corner at 0, 0, and its size. */
function shifted({ widths, heights, ins, outs }, flow) {
  let [left, right, top, bottom] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [i, w] of widths.entries()) {
    left = Math.min(left, flow.x[i]);
    right = Math.max(right, flow.x[i] + w);
    top = Math.min(top, flow.y[i]);
    bottom = Math.max(bottom, flow.y[i] + heights[i]);
  }
  for (const route of flow.routes) {
    for (let k = 0; k < route.length; k += 2) {
      left = Math.min(left, route[k]);
      right = Math.max(right, route[k]);
    }
  }
  // Edges of ports would begin a whole gap away from the frame.
  if (ins) top += GAP.rank / 2;
  if (outs) bottom -= GAP.rank / 2;
  const x = flow.x.map((v) => v - left);
  const y = flow.y.map((v) => v - top);
  const routes = flow.routes.map((route) => route.map((v, at) => v - (at % 2 ? top : left)));
  for (const route of routes) {
    if (route[1] < 0) route[1] = 0;
    if (route.at(-1) > bottom - top) route[route.length - 1] = bottom - top;
  }
  return { x, y, routes, width: right - left, height: bottom - top };
}
