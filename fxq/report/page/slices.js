/* Dagre takes much longer for a large graph than for its parts. A piece with too many boxes is cut into slices where few
   values live, and each is laid out by itself: what lives at a cut is a port of both slices. */

/** Boxes in a piece that is not sliced, at most; in a slice, from and to. */
const SLICE = { most: 44, from: 12, to: 26 };

/** The same where many edges run side by side: what reads one value then shares a line for most of the way. */
const THIN = { most: 10, from: 3, to: 7, edges: 14 };

/** How a piece is sliced; null where it is not. */
function slicing(count, edges) {
  if (count <= THIN.most) return null;
  const spans = new Int32Array(count + 1);
  for (const [a, b] of edges) {
    spans[a + 1]++;
    spans[b]--;
  }
  if (d3.max(d3.cumsum(spans)) > THIN.edges) return THIN;
  return count > SLICE.most ? SLICE : null;
}

/** @returns {Flow} */
function slicedFlow(widths, heights, edges, port) {
  const bounds = sliceBounds(widths.length, edges, port, slicing(widths.length, edges));
  const of = new Int32Array(widths.length);
  for (let k = 0; k < bounds.length - 1; k++) of.fill(k, bounds[k], bounds[k + 1]);
  const slices = sliceParts(bounds, of, widths, heights, edges, port);
  const x = new Array(widths.length);
  const y = new Array(widths.length);
  let bottom = 0;
  for (const [k, slice] of slices.entries()) {
    slice.flow = alike("dagre", slice.widths, slice.heights, slice.edges, slice.port, dagreFlow);
    stack(slice, slices[k - 1], bottom);
    bottom = slice.bottom;
    for (let i = bounds[k]; i < bounds[k + 1]; i++) {
      x[i] = slice.flow.x[slice.index.get(i)] + slice.dx;
      y[i] = slice.flow.y[slice.index.get(i)] + slice.dy;
    }
  }
  return { x, y, routes: edges.map(([a, b]) => routeThrough(slices, of, a, b)), width: 0, height: 0 };
}

/** Where to cut: few values live there, ports of the piece are not cut off. */
function sliceBounds(count, edges, port, size) {
  const live = new Int32Array(count + 2);
  const reach = new Int32Array(count);
  for (const [a, b] of edges) reach[a] = Math.max(reach[a], b);
  for (let a = 0; a < count; a++) {
    if (reach[a] <= a) continue;
    live[a + 1]++;
    live[reach[a] + 1]--;
  }
  for (let k = 1; k <= count; k++) live[k] += live[k - 1];
  const first = port.lastIndexOf(1) + 1;
  const last = port.includes(2) ? port.indexOf(2) : count - 1;
  const bounds = [0];
  while (count - bounds.at(-1) > size.to) {
    const low = Math.max(bounds.at(-1) + size.from, first);
    const high = Math.min(Math.max(bounds.at(-1) + size.to, first + 1), last);
    if (low > high) break;
    bounds.push(d3.least(d3.range(low, high + 1), (at) => live[at]));
  }
  return [...bounds, count];
}

/** What is laid out for each slice: values from above, boxes, values to below. Values are the boxes that they come from;
 * `index`: place of a box, `ins`, `outs`: of a value. */
function sliceParts(bounds, of, widths, heights, edges, port) {
  const slices = d3.pairs(bounds, (from, to) => ({ from, to, ins: new Map(), outs: new Map(), lines: new Map() }));
  const line = (k, tail, head) => slices[k].lines.set(`${tail} ${head}`, [tail, head]);
  for (const [a, b] of edges) {
    for (let k = of[a]; k < of[b]; k++) {
      slices[k].outs.set(a, 0);
      slices[k + 1].ins.set(a, 0);
    }
    if (of[a] === of[b]) line(of[a], a, b);
    else {
      line(of[a], a, `out ${a}`);
      for (let k = of[a] + 1; k < of[b]; k++) line(k, `in ${a}`, `out ${a}`);
      line(of[b], `in ${a}`, b);
    }
  }
  for (const slice of slices) {
    const boxes = d3.range(slice.from, slice.to);
    const [ins, outs] = [[...slice.ins.keys()], [...slice.outs.keys()]];
    const list = [...ins.map((a) => `in ${a}`), ...boxes, ...outs.map((a) => `out ${a}`)];
    slice.index = new Map(list.map((what, k) => [what, k]));
    slice.widths = [...ins.map(() => 6), ...boxes.map((i) => widths[i]), ...outs.map(() => 6)];
    slice.heights = [...ins.map(() => 0), ...boxes.map((i) => heights[i]), ...outs.map(() => 0)];
    slice.port = [...ins.map(() => 1), ...boxes.map((i) => port[i]), ...outs.map(() => 2)];
    slice.edges = [...slice.lines.values()].map(([tail, head]) => [slice.index.get(tail), slice.index.get(head)]);
    slice.number = new Map([...slice.lines.keys()].map((key, k) => [key, k]));
  }
  return slices;
}

/** Put a slice below the one above, its ports as near to theirs as can be. */
function stack(slice, above, bottom) {
  const { flow, ins, outs, heights, index } = slice;
  const tops = d3.range(slice.from, slice.to).map((i) => flow.y[index.get(i)]);
  const ends = d3.range(slice.from, slice.to).map((i) => flow.y[index.get(i)] + heights[index.get(i)]);
  slice.high = d3.min(tops) - (ins.size ? GAP.rank / 2 : 0); // in its own coordinates
  slice.low = d3.max(ends) + (outs.size ? GAP.rank / 2 : 0);
  slice.dy = bottom - slice.high;
  slice.bottom = slice.low + slice.dy;
  slice.dx = 0;
  const portX = (k, what) => k.flow.x[k.index.get(what)] + 3 + k.dx;
  if (above) slice.dx = d3.median(ins.keys(), (a) => portX(above, `out ${a}`) - portX(slice, `in ${a}`)) ?? 0;
  for (const a of ins.keys()) ins.set(a, portX(slice, `in ${a}`));
  for (const a of outs.keys()) outs.set(a, portX(slice, `out ${a}`));
}

/** The points of an edge through all slices that it runs through. */
function routeThrough(slices, of, a, b) {
  const part = (k, tail, head) => {
    const slice = slices[k];
    const route = slice.flow.routes[slice.number.get(`${tail} ${head}`)];
    const points = [];
    for (let at = 0; at < route.length; at += 2) {
      const [px, py] = [route[at], route[at + 1]];
      const isPort = (at === 0 && tail !== a) || (at === route.length - 2 && head !== b);
      if (!isPort && py >= slice.high && py <= slice.low) points.push(px + slice.dx, py + slice.dy);
    }
    return points;
  };
  if (of[a] === of[b]) return part(of[a], a, b);
  const points = part(of[a], a, `out ${a}`);
  for (let k = of[a] + 1; k <= of[b]; k++) {
    points.push((slices[k - 1].outs.get(a) + slices[k].ins.get(a)) / 2, slices[k].high + slices[k].dy);
    for (const value of k < of[b] ? part(k, `in ${a}`, `out ${a}`) : part(k, `in ${a}`, b)) points.push(value);
  }
  return points;
}
