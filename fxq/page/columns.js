/* A chain drawn top to bottom is a strip. Columns give it the shape of a screen: a layout that is much too tall is cut
   where few edges cross, and its parts stand side by side. Edges that cross a cut run through the gutter. */

const LANE = 9; // between two edges in a gutter
const GUTTER = 34; // around the lanes

/** A part of an edge. `ortho`: straight lines with round corners; else a curve that is vertical at every point.
 * @typedef {{ortho: boolean, points: number[]}} Stroke
 * @typedef {{x: number[], y: number[], strokes: Stroke[][], width: number, height: number}} Arranged */

/** The flow in columns, if that gives it a better shape. `aspect`: the wanted width / height.
 * @param {Parts} parts @param {Flow} flow @returns {Arranged} */
function inColumns(parts, flow, aspect, tallest) {
  const plain = () => ({ ...flow, strokes: flow.routes.map((points) => [{ ortho: false, points }]) });
  if (flow.height <= tallest) return plain();
  const count = Math.round(Math.sqrt((aspect * flow.height) / (flow.width + GUTTER)));
  if (count < 2) return plain();
  const cuts = chooseCuts(parts, flow, count);
  return cuts.length ? cutInColumns(parts, flow, cuts) : plain();
}

/** Heights at which to cut: between boxes, near equal parts, where few edges cross. */
function chooseCuts({ heights }, { y, routes, height }, count) {
  const gaps = []; // [from, to] without a box
  const boxes = y.map((top, i) => [top, top + heights[i]]).sort((a, b) => a[0] - b[0]);
  let end = -Infinity;
  for (const [top, bottom] of boxes) {
    if (end > -Infinity && top - end > 8) gaps.push([end, top]);
    end = Math.max(end, bottom);
  }
  const crossing = (at) => routes.filter((route) => Math.min(route[1], route.at(-1)) < at && at < Math.max(route[1], route.at(-1))).length;
  const candidates = gaps.map(([from, to]) => ({ at: (from + to) / 2, crossing: crossing((from + to) / 2) })).filter((c) => c.crossing <= 6);
  const cuts = [];
  for (let k = 1; k < count; k++) {
    const wanted = (k * height) / count;
    let best = null;
    for (const { at, crossing } of candidates) {
      const cost = Math.abs(at - wanted) / (height / count) + 0.08 * crossing;
      if (at > (cuts.at(-1) ?? 0) + 60 && cost < (best?.cost ?? 0.5)) best = { at, cost };
    }
    if (best) cuts.push(best.at);
  }
  return cuts;
}

function cutInColumns(parts, flow, cuts) {
  const bounds = [0, ...cuts, flow.height];
  const columnOf = (at) => Math.min(cuts.length, d3.bisectRight(cuts, at));
  const split = flow.routes.map((route) => splitRoute(route, cuts, columnOf));
  const lanes = cuts.map(() => 0); // used in each gutter
  for (const { jumps } of split) for (const jump of jumps) jump.lane = lanes[jump.cut]++;
  const most = Math.max(0, ...lanes);
  const extents = columnExtents(parts, flow, split, columnOf, cuts.length + 1);
  const top = most ? 16 + LANE * most : 0; // above all columns, for edges that come from the one before
  const shift = [];
  const gutters = [];
  let at = 0;
  for (const [k, [left, right]] of extents.entries()) {
    shift.push({ x: at - left, y: top - bounds[k] });
    at += right - left;
    gutters.push(at + GUTTER / 2);
    if (k < cuts.length) at += GUTTER + LANE * lanes[k];
  }
  const x = flow.x.map((v, i) => v + shift[columnOf(flow.y[i])].x);
  const y = flow.y.map((v, i) => v + shift[columnOf(flow.y[i])].y);
  const moved = (points, k) => points.map((v, i) => v + (i % 2 ? shift[k].y : shift[k].x));
  const strokes = split.map(({ flows, jumps }) => {
    const made = flows.map(({ column, points }) => ({ ortho: false, points: moved(points, column) }));
    for (const jump of jumps) made.push({ ortho: true, points: jumpPoints(jump, shift, bounds, gutters, top) });
    return made;
  });
  const height = Math.max(...bounds.slice(1).map((b, k) => b - bounds[k])) + top + 8 + LANE * most;
  return { x, y, strokes, width: at, height };
}

/** An edge cut at the columns: its parts inside columns, and its jumps from one to the next, at x `from`. */
function splitRoute(route, cuts, columnOf) {
  const flows = [];
  const jumps = [];
  let points = [route[0], route[1]];
  let column = columnOf(route[1]);
  for (let k = 2; k < route.length; k += 2) {
    const [px, py, qx, qy] = [route[k - 2], route[k - 1], route[k], route[k + 1]];
    const target = columnOf(qy);
    while (column !== target) {
      const down = target > column;
      const cut = down ? column : column - 1;
      const t = (cuts[cut] - py) / (qy - py || 1);
      const x = px + t * (qx - px);
      flows.push({ column, points: [...points, x, cuts[cut]] });
      jumps.push({ cut, x, down, lane: 0 });
      points = [x, cuts[cut]];
      column += down ? 1 : -1;
    }
    points.push(qx, qy);
  }
  flows.push({ column, points });
  return { flows, jumps };
}

/** Left and right of what is in each column. */
function columnExtents({ widths }, flow, split, columnOf, count) {
  const extents = d3.range(count).map(() => [Infinity, -Infinity]);
  const grow = (k, left, right) => {
    extents[k][0] = Math.min(extents[k][0], left);
    extents[k][1] = Math.max(extents[k][1], right);
  };
  for (const [i, left] of flow.x.entries()) grow(columnOf(flow.y[i]), left, left + widths[i]);
  for (const { flows } of split) for (const { column, points } of flows) for (let k = 0; k < points.length; k += 2) grow(column, points[k], points[k]);
  return extents.map(([left, right]) => (left > right ? [0, 0] : [left, right]));
}

/** From the lower end of a column through the gutter to the upper end of the next. */
function jumpPoints({ cut, x, down, lane }, shift, bounds, gutters, top) {
  const bottom = bounds[cut + 1] + shift[cut].y;
  const away = LANE * (lane + 1);
  const gutter = gutters[cut] + LANE * lane;
  const points = [x + shift[cut].x, bottom, x + shift[cut].x, bottom + away, gutter, bottom + away, gutter, top - away, x + shift[cut + 1].x, top - away, x + shift[cut + 1].x, top];
  if (down) return points;
  const back = [];
  for (let k = points.length - 2; k >= 0; k -= 2) back.push(points[k], points[k + 1]);
  return back;
}
