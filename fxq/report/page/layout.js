/* Where things are inside one group: dagre lays out its parts, we stack them.

   A group is laid out by itself. Its children are boxes of known size; a value that enters or leaves is a port, a box
   without size at the top or the bottom, so that edges run around boxes. A network is mostly a chain: where all that
   lives is one value, the graph is cut, and dagre is called for the piece between two cuts (pieces.js). */

const GAP = { rank: 40, node: 26, edge: 14 };

/** What is laid out: `widths`, `heights` of the boxes, in-ports first, then children, then out-ports; edges as pairs.
 * @typedef {{ins: number, outs: number, widths: number[], heights: number[], edges: [number, number][]}} Parts
 * `x`, `y`: top left of each box; `routes`: of each edge, its points [x, y, x, y, …] from top to bottom.
 * @typedef {{x: number[], y: number[], routes: number[][], width: number, height: number}} Flow */

/** @param {Parts} parts @returns {Flow} */
function layoutFlow(parts) {
  const { widths, edges } = parts;
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
