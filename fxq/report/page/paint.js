/* A picture on a canvas: frames, wires, boxes, from the outside in. What is out of view is left out, and what is too
   small to be read is drawn as less. */

/** What is emphasized. `selected`: name of a node, or "/" and the key of a group. `near`: names of nodes; when there are
 * some, all others are dimmed. `kin`: names of nodes that have to do with the selected one. `flash`: names of nodes that
 * just changed, shown for `glow`, 1 at first and 0 at the end.
 * @typedef {{selected: string, near: Set<string>, kin: Set<string>, flash: Set<string>, glow: number,
 *   hover: Placed|Frame|null}} Emphasis */

/** @param {CanvasRenderingContext2D} context @param {Picture} picture @param {{k: number, x: number, y: number}} view
 * @param {{width: number, height: number, ratio: number}} size @param {Emphasis} emphasis */
function paint(context, picture, { k, x, y }, size, emphasis) {
  const colours = theme();
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, size.width * size.ratio, size.height * size.ratio);
  context.setTransform(k * size.ratio, 0, 0, k * size.ratio, x * size.ratio, y * size.ratio);
  const seen = { left: -x / k, right: (size.width - x) / k, top: -y / k, bottom: (size.height - y) / k };
  const titles = [];
  const { items } = picture.scene;
  const shownOf = (names) => new Set([...names].filter((name) => items.has(name)).map((name) => shown(items.get(name))));
  const near = shownOf(emphasis.near);
  const [chosen] = shownOf([emphasis.selected]);
  const work = { context, colours, k, seen, emphasis, near, chosen, shownOf, titles, isDiff: picture.scene.diff !== null };
  paintFrame(work, picture.root);
  for (const frame of titles) paintTitle(work, frame);
  paintEmphasis(work, picture);
}

const isSeen = ({ x, y, width, height }, { left, right, top, bottom }) => x < right && x + width > left && y < bottom && y + height > top;

/** @param {any} work @param {Frame} frame */
function paintFrame(work, frame) {
  const { context, colours, k, seen } = work;
  const { group, width, height } = frame;
  if (!isSeen(frame, seen)) return;
  if (group.parent) {
    if (Math.min(width, height) * k < 12) {
      context.globalAlpha = work.isDiff && !hasMarks(group) ? 0.35 : 1;
      paintKinds(context, frame, group.kinds);
      context.globalAlpha = 1;
      return;
    }
    fill(context, frame, 6, frameColour(colours, group));
    stroke(context, frame, 6, colours["frame-line"], Math.max(1, 0.6 / k), "solid");
    work.titles.push(frame);
  }
  paintWires(work, frame);
  for (const placed of frame.boxes) {
    if (!isSeen(placed, seen)) continue;
    context.globalAlpha = isDim(work, placed.of) ? 0.38 : 1;
    if (isGroupOf(placed.of)) paintGroup(context, placed, k, colours);
    else paintNode(context, placed, k, colours);
  }
  context.globalAlpha = 1;
  for (const inner of frame.frames) paintFrame(work, inner);
}

const frameColour = (colours, group) => colours[`frame-${group.depth % 2}`];

const hasMarks = (group) => Object.values(group.marks).some(Boolean);

/** Whether a box is not what this is about. @param {any} work @param {any} of */
function isDim({ near, isDiff, chosen }, of) {
  if (of === chosen) return false;
  if (near.size) return !near.has(of);
  return isDiff && !(isGroupOf(of) ? hasMarks(of) : of.mark);
}

// ---- wires

const DASHES = { kept: [], added: [], removed: [6, 4], became: [2, 4] };

function paintWires(work, frame) {
  const { context, colours, k, isDiff } = work;
  if (k < 0.04) return;
  frame.drawn ??= pathsOf(frame);
  context.translate(frame.ox, frame.oy);
  for (const [pen, { lines, arrows }] of frame.drawn) {
    context.strokeStyle = context.fillStyle = isDiff ? colours[`pen-${pen}`] : colours.wire;
    context.globalAlpha = (isDiff && pen === "kept") || work.near.size ? 0.55 : 1;
    context.lineWidth = Math.max(pen === "kept" ? 1.2 : 1.8, (pen === "kept" ? 0.8 : 1.2) / k);
    context.setLineDash(DASHES[pen]);
    context.stroke(lines);
    if (k > 0.12) context.fill(arrows);
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
  context.translate(-frame.ox, -frame.oy);
}

/** Lines and arrow heads of a frame's wires, by pen. */
function pathsOf(frame) {
  const paths = new Map();
  for (const wire of frame.wires) {
    if (!paths.has(wire.pen)) paths.set(wire.pen, { lines: new Path2D(), arrows: new Path2D() });
    addWire(wire, paths.get(wire.pen));
  }
  return paths;
}

/** @param {Wire} wire @param {{lines: Path2D, arrows: Path2D}} path */
function addWire(wire, { lines, arrows }) {
  let last = null;
  for (const { ortho, points } of wire.strokes) {
    lines.moveTo(points[0], points[1]);
    if (ortho) addRounded(lines, points, 8);
    else {
      addFlow(lines, points);
      last = points;
    }
  }
  if (!wire.arrow || !last) return;
  const [x, y] = last.slice(-2);
  const way = last.at(-3) <= y ? 1 : -1;
  arrows.moveTo(x, y);
  arrows.lineTo(x - 4.5, y - 9 * way);
  arrows.lineTo(x + 4.5, y - 9 * way);
  arrows.closePath();
}

/** A curve through the points that is vertical at each; where it is much wider than high, straight with round corners. */
function addFlow(path, points) {
  for (let i = 2; i < points.length; i += 2) {
    const [px, py, qx, qy] = [points[i - 2], points[i - 1], points[i], points[i + 1]];
    const [dx, dy] = [Math.abs(px - qx), Math.abs(py - qy)];
    if (dx < 0.5) path.lineTo(qx, qy);
    else if (dx > 2 * dy) addRounded(path, [px, py, px, (py + qy) / 2, qx, (py + qy) / 2, qx, qy], Math.min(10, dy / 2));
    else path.bezierCurveTo(px, (py + qy) / 2, qx, (py + qy) / 2, qx, qy);
  }
}

function addRounded(path, points, radius) {
  const end = points.length - 2;
  for (let i = 2; i < end; i += 2) path.arcTo(points[i], points[i + 1], points[i + 2], points[i + 3], radius);
  path.lineTo(points[end], points[end + 1]);
}

// ---- on top of it all

/** The title of an open group; where the group is small, over its upper edge. */
function paintTitle({ context, colours, k, seen }, frame) {
  const { group, x, y, width } = frame;
  if (width * k < 46) return;
  const size = Math.max(12, Math.min(10.5 / k, 60));
  const text = clip(group.title, Math.max(6, Math.floor((width - 40) / (size * 0.56))));
  if (k >= LEVEL.text) {
    write(context, text, x + 10, Math.min(y + 18, y + FRAME.head), colours["frame-ink"], size, "bold");
    paintToggle(context, frame, "−", colours);
    return;
  }
  context.globalAlpha = 0.85;
  context.fillStyle = frameColour(colours, group);
  context.fillRect(x + 4, y + 2, textWidth(text, size, "bold") + 10, size * 1.25);
  context.globalAlpha = 1;
  write(context, text, x + 8, y + size, colours["frame-ink"], size, "bold");
}

/** Rings around what is chosen, pointed at, or part of the rewrite, and the wires of the chosen node. */
function paintEmphasis(work, picture) {
  const { context, colours, k, emphasis, near } = work;
  const ring = (of, colour, line) => {
    const placed = picture.places.get(of);
    if (isSeen(placed, work.seen)) ringAround(context, placed, colour, line / k, 3 / k);
  };
  if (emphasis.glow > 0) {
    context.globalAlpha = emphasis.glow;
    for (const of of work.shownOf(emphasis.flash)) ring(of, colours.halo, 3);
    context.globalAlpha = 1;
  }
  for (const of of near) ring(of, colours.halo, 3.5);
  for (const of of work.shownOf(emphasis.kin)) ring(of, colours.accent, 1.5);
  if (emphasis.hover && !emphasis.hover.group) ringAround(context, emphasis.hover, colours.accent, 1.2 / k, 2 / k);
  const group = emphasis.selected[0] === "/" && picture.scene.groups.get(emphasis.selected.slice(1));
  if (group && picture.places.has(group)) ring(group, colours.accent, 3);
  if (!work.chosen) return;
  paintWiresOf(work, picture.root, picture.scene.items.get(emphasis.selected));
  ring(work.chosen, colours.accent, 3);
}

function ringAround(context, { x, y, width, height }, colour, line, away) {
  const place = { x: x - away, y: y - away, width: width + 2 * away, height: height + 2 * away };
  stroke(context, place, 6 + away, colour, line, "solid");
}

function paintWiresOf(work, frame, item) {
  const { context, colours, k, seen } = work;
  if (!isSeen(frame, seen)) return;
  const path = { lines: new Path2D(), arrows: new Path2D() };
  for (const wire of frame.wires) if (wire.flows.some((edge) => edge.from === item || edge.to === item)) addWire(wire, path);
  context.translate(frame.ox, frame.oy);
  context.strokeStyle = context.fillStyle = colours.accent;
  context.lineWidth = Math.max(2, 1.6 / k);
  context.stroke(path.lines);
  context.fill(path.arrows);
  context.translate(-frame.ox, -frame.oy);
  for (const inner of frame.frames) paintWiresOf(work, inner, item);
}
