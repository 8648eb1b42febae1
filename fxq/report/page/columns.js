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
  const cuts = flow.height > tallest ? chooseCuts(parts, flow, aspect) : [];
  if (cuts.length) return cutInColumns(parts, flow, cuts);
  return { ...flow, strokes: flow.routes.map((points) => [{ ortho: false, points }]) };
}

const CROSSING = 14; // how much higher a column may be to save an edge from being cut

/** Heights at which to cut so that the whole fits best into a screen of that shape: between boxes, where few edges cross. */
function chooseCuts(parts, flow, aspect) {
  const places = placesToCut(parts, flow);
  const size = (cuts) => {
    const wide = d3.sum(columnExtents(parts, flow, [], cuts), ([left, right]) => right - left) + cuts.length * (GUTTER + LANE);
    const high = d3.max(d3.pairs([0, ...cuts, flow.height]), ([from, to]) => to - from);
    return Math.max(wide / aspect, high + (cuts.length ? 40 : 0));
  };
  const choices = d3.range(2, Math.min(14, places.length + 1) + 1).map((count) => evenCuts(places, flow.height, count));
  const best = d3.least(choices, size);
  return best && size(best) < 0.92 * size([]) ? best : [];
}

/** Where the flow can be cut: in the middle of every gap between boxes that not too many values cross. */
function placesToCut({ heights, edges }, { y, routes }) {
  const gaps = [];
  const boxes = y.map((top, i) => [top, top + heights[i]]).sort((a, b) => a[0] - b[0]);
  let end = boxes[0][1];
  for (const [top, bottom] of boxes) {
    if (top - end > 8) gaps.push((end + top) / 2);
    end = Math.max(end, bottom);
  }
  const values = gaps.map(() => new Set());
  for (const [number, route] of routes.entries()) {
    const [from, to] = d3.extent([route[1], route.at(-1)]);
    for (let k = d3.bisectRight(gaps, from); k < gaps.length && gaps[k] < to; k++) values[k].add(edges[number][0]);
  }
  return gaps.map((at, k) => ({ at, crossing: values[k].size })).filter((place) => place.crossing <= 6);
}

/** About so many columns of nearly the same height. */
function evenCuts(places, height, count) {
  const cuts = [];
  for (let top = 0; count > 1; count--) {
    const share = (height - top) / count;
    const below = places.filter(({ at }) => at > top && at < height);
    const place = d3.least(below, ({ at, crossing }) => CROSSING * crossing + Math.abs(at - top - share));
    if (place) cuts.push((top = place.at));
  }
  return cuts;
}

const columnAt = (cuts, y) => d3.bisectRight(cuts, y);

function cutInColumns(parts, flow, cuts) {
  const bounds = [0, ...cuts, flow.height];
  const split = flow.routes.map((route) => splitRoute(route, cuts));
  const lines = cuts.map(() => new Map()); // in each gutter, the number of each line's lane
  for (const [number, { jumps }] of split.entries()) {
    for (const jump of jumps) {
      const key = `${parts.edges[number][0]} ${Math.round(jump.x)}`; // edges of one value that lie on each other are one line
      if (!lines[jump.cut].has(key)) lines[jump.cut].set(key, lines[jump.cut].size);
      jump.lane = lines[jump.cut].get(key);
    }
  }
  const lanes = lines.map((line) => line.size);
  const most = Math.max(0, ...lanes);
  const extents = columnExtents(parts, flow, split, cuts);
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
  const x = flow.x.map((v, i) => v + shift[columnAt(cuts, flow.y[i])].x);
  const y = flow.y.map((v, i) => v + shift[columnAt(cuts, flow.y[i])].y);
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
function splitRoute(route, cuts) {
  const flows = [];
  const jumps = [];
  let points = [route[0], route[1]];
  let column = columnAt(cuts, route[1]);
  for (let k = 2; k < route.length; k += 2) {
    const [px, py, qx, qy] = [route[k - 2], route[k - 1], route[k], route[k + 1]];
    const target = columnAt(cuts, qy);
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
function columnExtents({ widths }, flow, split, cuts) {
  const extents = d3.range(cuts.length + 1).map(() => [Infinity, -Infinity]);
  const grow = (k, left, right) => {
    extents[k][0] = Math.min(extents[k][0], left);
    extents[k][1] = Math.max(extents[k][1], right);
  };
  for (const [i, left] of flow.x.entries()) grow(columnAt(cuts, flow.y[i]), left, left + widths[i]);
  for (const { flows } of split)
    for (const { column, points } of flows) for (let k = 0; k < points.length; k += 2) grow(column, points[k], points[k]);
  return extents.map(([left, right]) => (left > right ? [0, 0] : [left, right]));
}

/** From the lower end of a column through the gutter to the upper end of the next. */
function jumpPoints({ cut, x, down, lane }, shift, bounds, gutters, top) {
  const bottom = bounds[cut + 1] + shift[cut].y;
  const away = LANE * (lane + 1);
  const gutter = gutters[cut] + LANE * lane;
  const [from, to] = [x + shift[cut].x, x + shift[cut + 1].x];
  const corners = [
    [from, bottom],
    [from, bottom + away],
    [gutter, bottom + away],
    [gutter, top - away],
    [to, top - away],
    [to, top],
  ];
  return (down ? corners : corners.reverse()).flat();
}
