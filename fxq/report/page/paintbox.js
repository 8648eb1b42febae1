/* One box on the canvas: a node or a collapsed group, in full when it can be read, else as much as can be seen. */

const THEMES = {
  light: {
    paper: "#ffffff",
    box: "#ffffff",
    ink: "#1a1a1a",
    frames: ["#f4f6f8", "#e9edf1"],
    frameLine: "#bcc6d0",
    frameInk: "#44505c",
    wire: "#707a84",
    accent: "#0072b2",
    halo: "#e69f00",
    group: "#4d5b69",
    groupInk: "#ffffff",
    outline: "",
    roles: { name: "#5c5c5c", value: "#1a1a1a", scale: "#00548a", detail: "#5c5c5c", warn: "#a83f00", change: "#7a4f00" },
    pens: { kept: "#8b949d", added: "#007a5a", removed: "#c0392b", became: "#8a5a00" },
  },
  dark: {
    paper: "#14181d",
    box: "#222931",
    ink: "#e9edf1",
    frames: ["#1b2128", "#222a32"],
    frameLine: "#46525f",
    frameInk: "#b4c0cc",
    wire: "#8a96a3",
    accent: "#56b4e9",
    halo: "#f0b429",
    group: "#5d6d7e",
    groupInk: "#ffffff",
    outline: "#8a96a3",
    roles: { name: "#a3adb8", value: "#e9edf1", scale: "#86c5f4", detail: "#a3adb8", warn: "#ffa866", change: "#ffce6b" },
    pens: { kept: "#7d8894", added: "#2fbf95", removed: "#ff7b6b", became: "#d9a13b" },
  },
};

const theme = () => (isDark() ? THEMES.dark : THEMES.light);

const LEVEL = { text: 0.5, label: 0.17 }; // from which zoom on a box has all its text, or its label only

function roundedPath(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
}

/** Draw the box of a node. `k`: the zoom. @param {CanvasRenderingContext2D} context @param {Placed} placed */
function paintNode(context, placed, k, colours) {
  const { node, members, mark, box } = /** @type {Item} */ (placed.of);
  const look = members.length > 1 ? REPLACED : data.looks[node.kind];
  if (k < LEVEL.label) return paintBlock(context, placed, look.colour, mark, k);
  const change = mark ? data.changes[mark] : null;
  const { x, y, width, height } = placed;
  const strip = change ? STRIP : 0;
  const radius = box.pill ? 11 : 4;
  roundedPath(context, x, y, width, height, radius);
  context.fillStyle = box.pill || k < LEVEL.text ? look.colour : colours.box;
  context.fill();
  if (k >= LEVEL.text) {
    if (!box.pill) paintHead(context, { x, y: y + strip, width }, look, box, change ? 0 : radius);
    paintLines(context, placed, strip, look, colours);
  } else paintLabel(context, placed, box.head, look.ink, k, change);
  if (change && k >= LEVEL.text) paintStrip(context, placed, change.tag, change, radius);
  const border = change ?? look;
  const outline = colours.outline && !change && node.kind === "io" ? colours.outline : border.colour;
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

function stroke(context, { x, y, width, height }, radius, colour, line, border) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  if (border !== "solid") context.setLineDash(border === "dashed" ? [6, 3] : [2, 3]);
  roundedPath(context, x, y, width, height, radius);
  context.stroke();
  if (border !== "solid") context.setLineDash([]);
}

function paintHead(context, { x, y, width }, look, box, radius) {
  context.fillStyle = look.colour;
  roundedPath(context, x, y, width, HEAD.height, [radius, radius, 0, 0]);
  context.fill();
  context.fillStyle = look.ink;
  context.font = fontOf(HEAD.size, HEAD.weight);
  context.textAlign = "left";
  context.fillText(box.head, x + 9, y + 17);
  context.font = fontOf(10);
  context.textAlign = "right";
  context.fillText(box.tag, x + width - 8, y + 16);
}

function paintLines(context, { of, x, y, width }, strip, look, colours) {
  const { box } = of;
  const left = box.pill ? x + width / 2 : x + 9;
  context.textAlign = box.pill ? "center" : "left";
  if (box.pill) {
    context.fillStyle = look.ink;
    context.font = fontOf(12, "bold");
    context.fillText(box.head, left, y + strip + 17);
  }
  let at = y + strip + HEAD.height + (box.pill ? 9 : 13);
  for (const { text, role } of box.lines) {
    context.fillStyle = box.pill && role !== "change" ? look.ink : box.pill ? look.ink : colours.roles[role];
    context.font = fontOf(LINE.sizes[role]);
    context.fillText(text, left, at);
    at += LINE.height;
  }
}

/** The strip on top that says how a node changed. */
function paintStrip(context, { x, y, width }, text, change, radius) {
  context.fillStyle = change.colour;
  roundedPath(context, x, y, width, STRIP, [radius, radius, 0, 0]);
  context.fill();
  context.fillStyle = change.ink;
  context.font = fontOf(10.5, "bold");
  context.textAlign = "left";
  context.fillText(text, x + 8, y + 12);
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
  context.font = fontOf(size, "bold");
  context.fillStyle = ink;
  context.textAlign = "center";
  context.save();
  context.beginPath();
  context.rect(x + 3, top, width - 6, height);
  context.clip();
  context.fillText(label, x + width / 2, top + (y + height - top) / 2 + size * 0.36);
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
  if (k < LEVEL.label) return paintKinds(context, placed, group.kinds);
  for (const away of [6, 3]) {
    roundedPath(context, x + away, y + away, width, height, 5);
    context.fillStyle = colours.box;
    context.fill();
    stroke(context, { x: x + away, y: y + away, width, height }, 5, colours.group, 1, "solid");
  }
  roundedPath(context, x, y, width, height, 5);
  context.fillStyle = colours.box;
  context.fill();
  roundedPath(context, x, y, width, HEAD.height + 2, [5, 5, 0, 0]);
  context.fillStyle = colours.group;
  context.fill();
  if (k >= LEVEL.text) {
    context.fillStyle = colours.groupInk;
    context.font = fontOf(HEAD.size, HEAD.weight);
    context.textAlign = "left";
    context.fillText(group.box.head, x + 9, y + 18);
    context.fillStyle = colours.roles.name;
    context.font = fontOf(10.5);
    context.fillText(clip(countsOf(group.kinds), Math.floor(width / 5.6)), x + 9, y + 57);
    if (told) context.fillText(told, x + 9, y + 57 + STRIP);
  } else paintLabel(context, { x, y, width, height: HEAD.height + 6 }, group.box.head, colours.groupInk, k, null);
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
  const { x, y } = toggleOf(placed);
  roundedPath(context, x, y, TOGGLE, TOGGLE, 4);
  context.fillStyle = colours.box;
  context.fill();
  context.strokeStyle = colours.frameLine;
  context.lineWidth = 1;
  context.stroke();
  context.fillStyle = colours.ink;
  context.font = fontOf(14, "bold");
  context.textAlign = "center";
  context.fillText(sign, x + TOGGLE / 2, y + 14);
}
