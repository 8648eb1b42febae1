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

const MOST_CUTS = 64; // places to cut that are looked at
const CROSSING = 14; // how much higher a column may be to save an edge from being cut

/** Heights at which to cut so that the whole fits best into a screen of that shape: between boxes, where few edges cross. */
function chooseCuts(parts, flow, aspect) {
  const at = placesToCut(parts, flow);
  const ends = [...at.map((place) => place.at), flow.height];
  const width = columnWidths(parts, flow, [0, ...ends]);
  const size = (cuts) => {
    const columns = [0, ...cuts, ends.length];
    const wide = d3.sum(d3.pairs(columns), ([from, to]) => width(from, to)) + cuts.length * (GUTTER + LANE);
    const high = d3.max(d3.pairs([0, ...cuts.map((k) => ends[k - 1]), flow.height]), ([from, to]) => to - from);
    return Math.max(wide / aspect, high + (cuts.length ? 40 : 0));
  };
  let best = { cuts: [], size: 0.92 * size([]) };
  let levels = null;
  for (let count = 2; count <= Math.min(14, ends.length); count++) {
    levels = evenCuts(ends, at, levels);
    const cuts = levels.cutsTo(ends.length);
    const found = size(cuts);
    if (found < best.size) best = { cuts, size: found };
    else if (found > 1.6 * best.size) break;
  }
  return best.cuts.map((k) => ends[k - 1]);
}

/** Where the flow can be cut: in the middle of every gap between boxes that not too many lines cross. */
function placesToCut({ heights, edges }, { y, routes }) {
  const gaps = [];
  const boxes = y.map((top, i) => [top, top + heights[i]]).sort((a, b) => a[0] - b[0]);
  let end = boxes[0][1];
  for (const [top, bottom] of boxes) {
    if (top - end > 8) gaps.push((end + top) / 2);
    end = Math.max(end, bottom);
  }
  const lines = gaps.map(() => new Set()); // edges of one value that lie on each other are one line
  for (const [number, route] of routes.entries()) {
    const [from, to] = d3.extent([route[1], route.at(-1)]);
    for (let k = d3.bisectRight(gaps, from); k < gaps.length && gaps[k] < to; k++)
      lines[k].add(lineKey(edges[number][0], xAt(route, gaps[k])));
  }
  const places = gaps.map((at, k) => ({ at, crossing: lines[k].size })).filter((place) => place.crossing <= 6);
  const step = Math.ceil(places.length / MOST_CUTS);
  return places.filter((_, k) => k % step === 0);
}

const lineKey = (tail, x) => `${tail} ${Math.round(x)}`;

/** Where a route is at a height. */
function xAt(route, y) {
  for (let k = 2; k < route.length; k += 2) {
    const [px, py, qx, qy] = [route[k - 2], route[k - 1], route[k], route[k + 1]];
    if (Math.min(py, qy) <= y && y <= Math.max(py, qy)) return px + ((y - py) / (qy - py || 1)) * (qx - px);
  }
  return route.at(-2);
}

/** One column more than `fewer` (null: two columns) with the highest as low as can be: for each end, where the last
 * column begins. Columns are numbered by ends: the one from cut k begins at `ends[k - 1]`. */
function evenCuts(ends, at, fewer) {
  const top = (k) => (k ? ends[k - 1] : 0);
  const cost = (from, to) => top(to) - top(from) + CROSSING * (from ? at[from - 1].crossing : 0);
  const highest = new Array(ends.length + 1).fill(Infinity);
  const begin = new Array(ends.length + 1).fill(0);
  for (let to = 1; to <= ends.length; to++) {
    for (let from = 1; from < to; from++) {
      const high = Math.max(fewer ? fewer.highest[from] : cost(0, from), cost(from, to));
      if (high < highest[to]) [highest[to], begin[to]] = [high, from];
    }
  }
  const cutsTo = (to) => (begin[to] ? [...(fewer ? fewer.cutsTo(begin[to]) : []), begin[to]] : []);
  return { highest, cutsTo };
}

/** Width of what lies between two of the heights `tops`, by their numbers. */
function columnWidths({ widths }, { x, y }, tops) {
  const rows = tops.slice(1).map(() => [Infinity, -Infinity]);
  for (const [i, left] of x.entries()) {
    const row = rows[Math.max(0, Math.min(rows.length - 1, d3.bisectRight(tops, y[i]) - 1))];
    row[0] = Math.min(row[0], left);
    row[1] = Math.max(row[1], left + widths[i]);
  }
  return (from, to) => {
    const [left, right] = [d3.min(rows.slice(from, to), (row) => row[0]), d3.max(rows.slice(from, to), (row) => row[1])];
    return Math.max(0, right - left);
  };
}

function cutInColumns(parts, flow, cuts) {
  const bounds = [0, ...cuts, flow.height];
  const columnOf = (at) => Math.min(cuts.length, d3.bisectRight(cuts, at));
  const split = flow.routes.map((route) => splitRoute(route, cuts, columnOf));
  const lines = cuts.map(() => new Map()); // in each gutter, the number of each line's lane
  for (const [number, { jumps }] of split.entries()) {
    for (const jump of jumps) {
      const key = lineKey(parts.edges[number][0], jump.x);
      if (!lines[jump.cut].has(key)) lines[jump.cut].set(key, lines[jump.cut].size);
      jump.lane = lines[jump.cut].get(key);
    }
  }
  const lanes = lines.map((line) => line.size);
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
  for (const { flows } of split)
    for (const { column, points } of flows) for (let k = 0; k < points.length; k += 2) grow(column, points[k], points[k]);
  return extents.map(([left, right]) => (left > right ? [0, 0] : [left, right]));
}

/** From the lower end of a column through the gutter to the upper end of the next. */
function jumpPoints({ cut, x, down, lane }, shift, bounds, gutters, top) {
  const bottom = bounds[cut + 1] + shift[cut].y;
  const away = LANE * (lane + 1);
  const gutter = gutters[cut] + LANE * lane;
  const points = [
    x + shift[cut].x,
    bottom,
    x + shift[cut].x,
    bottom + away,
    gutter,
    bottom + away,
    gutter,
    top - away,
    x + shift[cut + 1].x,
    top - away,
    x + shift[cut + 1].x,
    top,
  ];
  if (down) return points;
  const back = [];
  for (let k = points.length - 2; k >= 0; k -= 2) back.push(points[k], points[k + 1]);
  return back;
}
