/* One box on the canvas: a node or a collapsed group, in full when it can be read, else as much as can be seen. */

/** The variables of the style sheet that a canvas is painted with. */
const COLOURS = [
  ..."paper box ink accent halo wire group group-ink outline frame-0 frame-1 frame-line frame-ink".split(" "),
  ...["name", "value", "scale", "detail", "warn", "change"].map((role) => `role-${role}`),
  ...["kept", "added", "removed", "became"].map((pen) => `pen-${pen}`),
];

const coloursOf = memo((/* isDark */) => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
});

const theme = () => coloursOf(isDark());

const LEVEL = { text: 0.5, label: 0.17 }; // from which zoom on a box has all its text, or its label only

function roundedPath(context, { x, y, width, height }, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
}

function fill(context, place, radius, colour) {
  roundedPath(context, place, radius);
  context.fillStyle = colour;
  context.fill();
}

function write(context, text, x, y, colour, size, weight = "", align = "left") {
  context.fillStyle = colour;
  context.font = fontOf(size, weight);
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** Draw the box of a node. `k`: the zoom. @param {CanvasRenderingContext2D} context @param {Placed} placed */
function paintNode(context, placed, k, colours) {
  const { node, members, mark, box } = /** @type {Item} */ (placed.of);
  const look = members.length > 1 ? REPLACED : data.looks[node.kind];
  if (k < LEVEL.label) return paintBlock(context, placed, look.colour, mark, k);
  const change = mark ? data.changes[mark] : null;
  const { x, y, width } = placed;
  const strip = change ? STRIP : 0;
  const radius = box.pill ? 11 : 4;
  fill(context, placed, radius, box.pill || k < LEVEL.text ? look.colour : colours.box);
  if (k >= LEVEL.text) paintLines(context, placed, strip, look, colours, change ? 0 : radius);
  else paintLabel(context, placed, box.head, look.ink, k, change);
  if (change && k >= LEVEL.text) {
    fill(context, { x, y, width, height: STRIP }, [radius, radius, 0, 0], change.colour);
    write(context, change.tag, x + 8, y + 12, change.ink, 10.5, "bold");
  }
  const border = change ?? look;
  const outline = !change && node.kind === "io" ? colours.outline : border.colour;
  stroke(context, placed, radius, outline, change ? 2.5 : 1.3, border.border);
}

/** Draw a box too small for text. */
function paintBlock(context, { x, y, width, height }, colour, mark, k) {
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
  if (!mark) return;
  const line = Math.min(14, 2.5 / k);
  context.strokeStyle = data.changes[mark].colour;
  context.lineWidth = line;
  context.strokeRect(x - line / 2, y - line / 2, width + line, height + line);
}

function stroke(context, place, radius, colour, line, border) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  if (border !== "solid") context.setLineDash(border === "dashed" ? [6, 3] : [2, 3]);
  roundedPath(context, place, radius);
  context.stroke();
  if (border !== "solid") context.setLineDash([]);
}

/** The head with the op and its tag, and the lines below. */
function paintLines(context, { of, x, y, width }, strip, look, colours, radius) {
  const { head, tag, pill, lines } = of.box;
  const [left, top, align] = [pill ? x + width / 2 : x + 9, y + strip, pill ? "center" : "left"];
  if (!pill) fill(context, { x, y: top, width, height: HEAD.height }, [radius, radius, 0, 0], look.colour);
  write(context, head, left, top + 17, look.ink, pill ? 12 : HEAD.size, HEAD.weight, align);
  write(context, tag, x + width - 8, top + 16, look.ink, 10, "", "right");
  for (const [k, { text, role }] of lines.entries()) {
    const at = top + HEAD.height + (pill ? 9 : 13) + k * LINE.height;
    write(context, text, left, at, pill ? look.ink : colours[`role-${role}`], LINE.sizes[role], "", align);
  }
}

/** The label alone, as large as fits: for a zoom at which lines cannot be read. */
function paintLabel(context, { x, y, width, height }, text, ink, k, change) {
  let top = y;
  if (change) {
    const bar = Math.min(height / 3, 9 / k);
    context.fillStyle = change.colour;
    context.fillRect(x, y, width, bar);
    top += bar;
  }
  const wanted = Math.min(11 / k, (height - (top - y)) * 0.6, 34);
  const label = change ? `${change.tag[0]} ${text}` : text;
  const size = Math.max(Math.min(wanted, (wanted * (width - 12)) / textWidth(label, wanted, "bold")), wanted * 0.6);
  context.save();
  context.beginPath();
  context.rect(x + 3, top, width - 6, height);
  context.clip();
  write(context, label, x + width / 2, top + (y + height - top) / 2 + size * 0.36, ink, size, "bold", "center");
  context.restore();
}

// ---- collapsed groups

/** `9 int8 · 2 float`: how many nodes of each kind. @param {Map<string, number>} kinds */
const countsOf = (kinds) =>
  [...kinds]
    .sort((a, b) => b[1] - a[1])
    .map(([kind, n]) => `${n} ${data.looks[kind].tag}`)
    .join(" · ");

/** `+3 −5`: how many nodes changed, and how. */
const marksOf = (marks) =>
  Object.entries(marks)
    .filter(([, n]) => n)
    .map(([mark, n]) => `${data.changes[mark].tag[0]}${n}`)
    .join("  ");

function paintGroup(context, placed, k, colours) {
  const group = /** @type {Group} */ (placed.of);
  const { x, y, width, height } = placed;
  const told = marksOf(group.marks);
  if (group.item) {
    paintNode(context, { ...placed, of: group.item }, k, colours);
    if (k >= LEVEL.text) paintToggle(context, placed, "+", colours);
    return;
  }
  if (k < LEVEL.label) return paintKinds(context, placed, group.kinds);
  for (const away of [6, 3]) {
    const behind = { x: x + away, y: y + away, width, height };
    fill(context, behind, 5, colours.box);
    stroke(context, behind, 5, colours.group, 1, "solid");
  }
  fill(context, placed, 5, colours.box);
  fill(context, { x, y, width, height: HEAD.height + 2 }, [5, 5, 0, 0], colours.group);
  if (k >= LEVEL.text) {
    write(context, group.box.head, x + 9, y + 18, colours["group-ink"], HEAD.size, HEAD.weight);
    write(context, clip(countsOf(group.kinds), Math.floor(width / 5.6)), x + 9, y + 57, colours["role-name"], 10.5);
    write(context, told, x + 9, y + 57 + STRIP, colours["role-name"], 10.5);
  } else paintLabel(context, { x, y, width, height: HEAD.height + 6 }, group.box.head, colours["group-ink"], k, null);
  paintKinds(context, { x: x + 9, y: y + 33, width: width - 18, height: 9 }, group.kinds);
  if (k >= LEVEL.text) paintToggle(context, placed, "+", colours);
  const loudest = Object.entries(group.marks).sort((a, b) => b[1] - a[1])[0];
  const border = told ? data.changes[loudest[0]].colour : colours.group;
  stroke(context, placed, 5, border, told ? 2.5 : 1.3, "solid");
}

/** A bar that shows how many nodes are of which kind. */
function paintKinds(context, { x, y, width, height }, kinds) {
  const total = d3.sum(kinds.values());
  let at = x;
  for (const kind in data.looks) {
    const part = ((kinds.get(kind) ?? 0) * width) / total;
    if (!part) continue;
    context.fillStyle = data.looks[kind].colour;
    context.fillRect(at, y, part, height);
    at += part;
  }
}

const TOGGLE = 18;

/** Where the + or − of a group is. @param {{x: number, y: number, width: number}} placed */
const toggleOf = ({ x, y, width }) => ({ x: x + width - TOGGLE - 5, y: y + 4, width: TOGGLE, height: TOGGLE });

function paintToggle(context, placed, sign, colours) {
  const place = toggleOf(placed);
  fill(context, place, 4, colours.box);
  stroke(context, place, 4, colours["frame-line"], 1, "solid");
  write(context, sign, place.x + TOGGLE / 2, place.y + 14, colours.ink, 14, "bold", "center");
}
