/* From a scene to places: which boxes and edges are seen with the groups open as they are, and where each is. */

const FRAME = { head: 26, side: 16, bottom: 14 };

/** An edge inside one open group, between two of its children or to a port: every edge of the scene that runs there.
 * @typedef {{pen: string, arrow: boolean, strokes: Stroke[], flows: Edge[]}} Wire
 * An open group with what is in it. `x`, `y` of boxes and frames are those of the whole picture, those of wires count
 * from `ox`, `oy`.
 * @typedef {{group: Group, x: number, y: number, width: number, height: number, ox: number, oy: number,
 *   boxes: Placed[], frames: Frame[], wires: Wire[], drawn?: any}} Frame
 * @typedef {{of: Item|Group, x: number, y: number, width: number, height: number}} Placed
 * @typedef {{scene: Scene, root: Frame, places: Map<Item|Group, Placed|Frame>, boxes: number, width: number, height: number,
 *   version: number}} Picture  `version`: that of `opened` */

/** The pictures of scenes as they were made last. @type {WeakMap<Scene, Picture>} */
const pictures = new WeakMap();

/** The picture of a scene. @param {Scene} scene @returns {Picture} */
function arrange(scene) {
  let picture = pictures.get(scene);
  if (picture?.version !== opened.version) pictures.set(scene, (picture = arrangeAnew(scene)));
  return picture;
}

function arrangeAnew(scene) {
  const picture = { scene, root: null, places: new Map(), boxes: 0, version: opened.version };
  const inner = new Map(); // what runs in each open group
  for (const edge of scene.edges) addInner(inner, edge);
  picture.root = place(measure(scene.root, inner), 0, 0, picture);
  return { ...picture, width: picture.root.width, height: picture.root.height };
}

const noLines = () => ({ ins: new Map(), outs: new Map(), pairs: new Map() });

/** For each open group that an edge runs in: its line there. Ends are places of children, or the value of a port. */
function addInner(inner, edge) {
  let a = shown(edge.from);
  let b = shown(edge.to);
  if (a === b) return;
  let [up, down] = [a.parent, b.parent];
  const value = valueOfEdge(edge);
  while (up !== down) {
    if (down.depth >= up.depth) {
      addLine(inner, down, { from: null, to: b, value, edge });
      b = down;
      down = down.parent;
    } else {
      addLine(inner, up, { from: a, to: null, value, edge });
      a = up;
      up = up.parent;
    }
  }
  addLine(inner, up, { from: a, to: b, value, edge });
}

/** Edges of one value share a port. */
const valueOfEdge = (edge) => (edge.pen === "became" ? `${edge.from.name} became` : edge.from.name);

function addLine(inner, group, { from, to, value, edge }) {
  if (!inner.has(group)) inner.set(group, noLines());
  const lines = inner.get(group);
  // In-ports are counted from -1 down, out-ports from a million up, until the number of children is known.
  const port = (ports) => (ports.has(value) ? ports.get(value) : ports.set(value, ports.size).get(value));
  const tail = from ? from.at : -1 - port(lines.ins);
  const head = to ? to.at : 1e6 + port(lines.outs);
  const key = tail * 4e6 + head;
  const pair = lines.pairs.get(key);
  if (pair) pair.flows.push(edge);
  else lines.pairs.set(key, { tail, head, flows: [edge], arrow: to !== null && !(isGroupOf(to) && isOpen(to)) });
}

/** The layout of an open group, inside out. */
function measure(group, inner) {
  const lines = inner.get(group) ?? noLines();
  const [ins, outs, count] = [lines.ins.size, lines.outs.size, group.children.length];
  const children = group.children.map((child) => (isGroupOf(child) && isOpen(child) ? measure(child, inner) : child));
  const ports = (n) => new Array(n).fill(0);
  const parts = {
    isRoot: group.parent === null,
    ins,
    outs,
    widths: [...ports(ins).fill(12), ...children.map((c) => c.width ?? c.box.width), ...ports(outs).fill(12)],
    heights: [...ports(ins), ...children.map((c) => c.height ?? c.box.height), ...ports(outs)],
    edges: [],
  };
  for (const { tail, head } of lines.pairs.values())
    parts.edges.push([tail < 0 ? -1 - tail : ins + tail, head >= 1e6 ? ins + count + head - 1e6 : ins + head]);
  const arranged = flowOf(JSON.stringify(parts));
  const inX = new Map([...lines.ins].map(([value, k]) => [value, arranged.x[k] + 6]));
  const outX = new Map([...lines.outs].map(([value, k]) => [value, arranged.x[ins + count + k] + 6]));
  const title = group.parent ? textWidth(clip(group.title), 12, "bold") + 70 : 0;
  const width = Math.max(arranged.width, title) + 2 * FRAME.side;
  const indent = FRAME.side + (width - 2 * FRAME.side - arranged.width) / 2;
  return { group, children, lines, ins, arranged, inX, outX, indent, width, height: arranged.height + FRAME.head + FRAME.bottom };
}

/** The arranged parts of a group as JSON: kept by content, which has no names. @returns {Arranged} */
const flowOf = memo((text) => {
  const parts = JSON.parse(text);
  if (!parts.widths.length) return { x: [], y: [], strokes: [], width: 0, height: 0 };
  return parts.isRoot ? inColumns(parts, layoutFlow(parts), 1.2, 700) : inColumns(parts, layoutFlow(parts), 0.9, 1000);
});

/** Give an open group its place, and everything in it. @returns {Frame} */
function place(measured, x, y, picture) {
  const { group, children, lines, ins, arranged, indent, width, height } = measured;
  const frame = { group, x, y, width, height, ox: x + indent, oy: y + FRAME.head, boxes: [], frames: [], wires: [] };
  picture.places.set(group, frame);
  for (const [k, child] of children.entries()) {
    const at = { x: frame.ox + arranged.x[ins + k], y: frame.oy + arranged.y[ins + k] };
    if (child.group) {
      frame.frames.push(place(child, at.x, at.y, picture));
      continue;
    }
    const placed = { of: child, ...at, width: child.box.width, height: child.box.height };
    frame.boxes.push(placed);
    picture.places.set(child, placed);
    picture.boxes++;
  }
  let number = 0;
  for (const pair of lines.pairs.values()) wire(frame, pair, arranged.strokes[number++], measured);
  return frame;
}

/** The edges between two children as wires, one for each pen, and where they meet open groups one for each value: it
 * ends at the port of that value. */
function wire(frame, { tail, head, arrow, flows }, strokes, measured) {
  const { children, arranged, ins } = measured;
  const [from, to] = [children[tail], children[head]];
  const [top, bottom] = [tail < 0 ? -FRAME.head : null, head >= 1e6 ? frame.height - FRAME.head : null];
  const perValue = Boolean(from?.group || to?.group);
  const isShort = strokes.length === 1 && strokes[0].points.length === 4;
  let number = 0;
  for (const edges of flows.length === 1
    ? [flows]
    : d3.group(flows, (edge) => (perValue ? `${edge.pen} ${valueOfEdge(edge)}` : edge.pen)).values()) {
    const value = valueOfEdge(edges[0]);
    const offset = OFFSETS[number++ % OFFSETS.length]; // side by side, where they have the same way
    let startX = from?.group ? arranged.x[ins + tail] + from.indent + from.outX.get(value) : null;
    let endX = to?.group ? arranged.x[ins + head] + to.indent + to.inX.get(value) : null;
    // A short edge between a box and a port is straight where the box is above or below the port.
    if (isShort && from && !from.group && endX !== null) startX = clampInto(endX, arranged.x[ins + tail], from.box.width);
    else if (isShort && to && !to.group && startX !== null) endX = clampInto(startX, arranged.x[ins + head], to.box.width);
    const moves = startX !== null || endX !== null || top !== null || bottom !== null || offset;
    const made = moves ? moveEnds(strokes, { startX, endX, top, bottom, offset }) : strokes;
    frame.wires.push({ pen: edges[0].pen, arrow, strokes: made, flows: edges });
  }
}

const OFFSETS = [0, 5, -5, 10, -10];

/** `x`, or what is next to it on a side of a box, away from the corners. */
const clampInto = (x, left, width) => Math.max(left + 14, Math.min(left + width - 14, x));

/** A copy of the strokes that begins and ends elsewhere: at the port of a group, at the frame around. */
function moveEnds(strokes, { startX, endX, top, bottom, offset }) {
  const made = strokes.map((stroke) => ({
    ...stroke,
    points: offset ? stroke.points.map((v, k) => (k % 2 ? v : v + offset)) : stroke.points.slice(),
  }));
  const flows = made.filter((stroke) => !stroke.ortho);
  const jumps = made.filter((stroke) => stroke.ortho);
  const [first, last] = [flows[0].points, flows.at(-1).points];
  if (startX !== null) {
    if (jumps.length && isStraight(first)) [first[2], jumps[0].points[0], jumps[0].points[2]] = [startX, startX, startX];
    first[0] = startX;
  }
  if (endX !== null) {
    const jump = jumps.at(-1)?.points;
    if (jump && isStraight(last)) [last[0], jump[jump.length - 2], jump[jump.length - 4]] = [endX, endX, endX];
    last[last.length - 2] = endX;
  }
  if (top !== null) first.unshift(first[0], top);
  if (bottom !== null) last.push(last.at(-2), bottom);
  return made;
}

/** Whether a part of an edge goes straight down: then it can be moved as a whole. */
const isStraight = (points) => points.length === 4 && Math.abs(points[0] - points[2]) < 1;
